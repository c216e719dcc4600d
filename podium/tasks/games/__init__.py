"""Built-in tasks with generated questions, and their tools. Does not import jax."""
