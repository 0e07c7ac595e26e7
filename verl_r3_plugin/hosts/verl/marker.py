"""How the plugin reaches a trainer whose VERL has no plugin group (0.8): an object that travels with the first log-probs.

`external_lib` is imported where a model configuration is built, which is in workers and agent loops, not in the trainer. Unpickling this
object imports the package there, which arms it, in time for the handshake before the first update. Where the package is missing in the
trainer's environment the unpickling fails, and names it.
"""

from __future__ import annotations


class Loaded:
    """Says nothing; being unpickled is what it is for."""


def needed() -> bool:
    """Whether the installed VERL loads no plugins by itself."""
    import verl

    return "_plugins_policy" not in vars(verl)
