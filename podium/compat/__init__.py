"""Configs of other systems: their keys, and the translation of the seed system's files. The core imports none of it.

The seed system is the TPU trainer that Podium grew from (MLLM-JAX).
"""
