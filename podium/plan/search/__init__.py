"""Searches over settings and machines."""
