"""Plans from compiled programs."""
