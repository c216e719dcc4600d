"""Tokenizers, chat templates and chat formats. No jax."""
