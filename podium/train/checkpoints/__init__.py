"""Checkpoints: when a step is saved, its files, and their digests."""
