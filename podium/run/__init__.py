"""A run resolved: settings, model and machine become one frozen `RunSpec`, which trainer, planner and benches share."""
