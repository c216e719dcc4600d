"""Resolves settings, model and machine to one frozen `RunSpec`, shared by trainer, planner and benchmarks."""
