"""Model files: safetensors, GGUF and PEFT, found, read and written."""
