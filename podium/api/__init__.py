"""The Python interface: start runs, read them, and query their weights (docs/python.md)."""

from podium.compat.foreign_keys import offer_hints
from podium.malloc import keep_freed_memory

keep_freed_memory()  # before libraries start threads
offer_hints()
