"""What the package adds to itself from the host side, registered under the entry-point group like anybody else's plugin."""

from __future__ import annotations

from ..hookspecs import hookimpl


@hookimpl
def r3_replay_modes():
    from .megatron import MegatronReplayMode

    return [MegatronReplayMode()]
