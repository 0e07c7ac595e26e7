"""Whether the compiled loops can be had, asked once and only when there is enough work to repay importing numba."""

from __future__ import annotations

import os
from functools import lru_cache
from types import ModuleType

SMALLEST_INPUT = 4096  # fields; below it numpy takes about as long as a compiled call
NUMBA_SWITCH = "VERL_R3_NUMBA"


@lru_cache(maxsize=1)
def _kernels() -> ModuleType | None:
    if os.environ.get(NUMBA_SWITCH) == "0":
        return None
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels


def kernels_for(fields: int) -> ModuleType | None:
    """The compiled loops for an input of this many (row, layer) fields, or None where numpy has to do."""
    return _kernels() if fields >= SMALLEST_INPUT else None
