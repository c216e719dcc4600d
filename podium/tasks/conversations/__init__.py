"""Conversations: their interface, environments and tools, and the processes that hold them. No jax."""
