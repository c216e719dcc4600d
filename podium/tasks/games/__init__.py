"""Built-in tasks whose questions are generated, with the tools that they offer. No jax."""
