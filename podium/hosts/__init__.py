"""The machines of a run: jax's settings, agreement between hosts, and signals."""
