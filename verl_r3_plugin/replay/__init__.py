"""Replay in the trainer: which rows and layers belong to this rank (`local.py`), and the object that a router asks (`layer.py`)."""

from .mode import ReplayMode, ReplaySession

__all__ = ["ReplayMode", "ReplaySession"]
