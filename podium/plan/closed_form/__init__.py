"""Plans without a compiler or jax: sums over what the config says, and the floor of each program."""
