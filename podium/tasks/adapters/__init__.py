"""Tasks of other packages: TextArena, reasoning-gym, verifiers."""
