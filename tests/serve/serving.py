"""Sizes of the server that tests ask."""

CONTEXT = 128
QUEUE = 60
