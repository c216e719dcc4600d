"""Conversations: their interface, environments and tools, and the processes that run them. No jax."""
