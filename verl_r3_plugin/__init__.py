"""Rollout routing replay (R3) for unmodified VERL, Agent Lightning, vLLM and Megatron-core.

Importing this package imports numpy and nothing heavier: a gateway needs no torch, and `import verl` must not pull in Megatron.
"""

__version__ = "0.1.0"
