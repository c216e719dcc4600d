"""Grades answers in mathematics: what a completion states, and whether it equals the reference. No jax."""
