"""`podium bench`: times the parts of a step on this machine."""
