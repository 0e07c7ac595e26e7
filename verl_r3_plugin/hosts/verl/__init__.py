"""VERL as the host: activation, the engine that replays, the field, and capture in the agent loops.

VERL loads the entry point `verl.plugins`, it does not call it. So importing this module is what arms the plugin in a process
(`activation.py` tells what that means); `activate` is there for the entry point to name, and to be called by hand.
"""

from __future__ import annotations

from typing import Any

from .activation import arm

arm()


def activate() -> None:
    """Arm the plugin in this process; imports nothing of VERL, so it may be called while VERL is only half imported."""
    arm()


def facts() -> dict[str, Any]:
    """Which VERL is installed, and through which of its seams the plugin works (for `verl-r3 doctor`); see `facts.py`."""
    from .seams import facts as read

    return read()
