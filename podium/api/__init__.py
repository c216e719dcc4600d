"""Podium from Python: runs begun, read and asked (docs/python.md)."""

from podium.malloc import keep_freed_memory

keep_freed_memory()  # before libraries start threads
