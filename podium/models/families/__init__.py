"""The model families: their config.json, GGUF metadata and presets. No jax."""
