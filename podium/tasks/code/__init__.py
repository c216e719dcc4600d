"""Code that a model writes: what is asked, and how it is run and graded. No jax."""
