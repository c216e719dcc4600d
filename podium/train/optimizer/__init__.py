"""Optimizers, and where their moments are stored."""
