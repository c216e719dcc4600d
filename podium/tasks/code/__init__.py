"""Tasks in which a model writes code: the questions, running the code, and grading it. Does not import jax."""
