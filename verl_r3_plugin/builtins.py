"""The encodings and capture sources that come with the package, registered like anybody else's (replay modes: hosts/plugin.py)."""

from __future__ import annotations

from .hookspecs import hookimpl


@hookimpl
def r3_encodings():
    from .codec.packed import PackedEncoding
    from .codec.raw import RawEncoding
    from .codec.set import SetEncoding

    return [RawEncoding(), PackedEncoding(), SetEncoding()]


@hookimpl
def r3_capture_sources():
    from .capture import VllmCapture

    return [VllmCapture()]
