"""Plans without a compiler: closed forms, and programs that are traced and read."""
