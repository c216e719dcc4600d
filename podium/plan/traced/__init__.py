"""Plans without a compiler: programs that are traced and read."""
