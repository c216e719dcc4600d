"""The Python interface: start runs, read them, and query their weights (docs/python.md)."""

from podium.compat.foreign_keys import foreign_key
from podium.config.hints import offer
from podium.malloc import keep_freed_memory

keep_freed_memory()  # before libraries start threads
offer(foreign_key)
