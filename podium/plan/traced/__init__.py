"""Plans from closed forms, without a compiler."""
