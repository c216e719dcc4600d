"""Grades answers in mathematics: extracts a completion's final answer and compares it with the reference. Does not
import jax.
"""
