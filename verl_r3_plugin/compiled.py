"""Whether the compiled loops can be had, asked only when there is enough work to repay importing numba (half a second)."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from types import ModuleType

REPAYS_LOADING = 4096  # (row, layer) fields from which on numba is loaded
REPAYS_CALLING = 64  # and used, once it is
NUMBA_SWITCH = "VERL_R3_NUMBA"

_logger = logging.getLogger(__name__)


def kernels_for(fields: int) -> ModuleType | None:
    """The compiled loops for an input of this many (row, layer) fields, or None where numpy has to do."""
    if fields < (REPAYS_CALLING if _kernels.cache_info().currsize else REPAYS_LOADING):
        return None
    return _kernels()


@lru_cache(maxsize=1)
def _kernels() -> ModuleType | None:
    if os.environ.get(NUMBA_SWITCH) == "0":
        return None
    try:
        from . import kernels
    except ImportError:
        return None
    except Exception as error:  # numba finds no folder for its cache, or does not know this numpy
        _logger.warning("R3 codec: numba is installed but can't be used, so numpy is, ten times slower: %s", error)
        return None
    return kernels
