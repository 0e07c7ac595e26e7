"""The three things another package may add. Register a module or object with these functions under the entry-point group
`verl_r3_plugin`; the built-ins are registered the same way (see `builtins.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .capture import CaptureSource
    from .codec import Encoding
    from .replay import ReplayMode

PROJECT = "verl_r3_plugin"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def r3_encodings() -> list[Encoding]:
    """Encodings of route rows, each under a name that `custom.r3.codec` can give."""


@hookspec
def r3_capture_sources() -> list[CaptureSource]:
    """Ways to turn what a rollout engine returned into routes, each under a name that `custom.r3.capture` can give."""


@hookspec
def r3_replay_modes() -> list[ReplayMode]:
    """Ways to make a trainer use the routes, each under a name that `custom.r3.replay` can give."""
