"""What an encoding of route rows is, and the one error that all of them share."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..errors import CodecError
from ..schema import RouteSchema


class RankOutOfRange(CodecError):
    """A stored value that stands for no expert, or for no set of experts."""


class Encoding(Protocol):
    """Rows <-> bytes. An encoding sees present rows only; the envelope around it holds everything else."""

    name: str

    def body_bytes(self, rows: int, schema: RouteSchema) -> int:
        """Exact length of the body of this many rows."""
        ...

    def encode(self, ids: np.ndarray, schema: RouteSchema) -> bytes:
        """Body of `ids` [rows, moe_layers, top_k], dtype `schema.id_dtype`."""
        ...

    def decode(self, body: np.ndarray, schema: RouteSchema, rows: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """ids [len(rows), len(layers), top_k], dtype `schema.id_dtype`, of the asked rows and layer ordinals (int64) alone.

        body: uint8, of exactly `body_bytes` bytes, its checksum already verified. Raises RankOutOfRange for a stored value that
        no valid row gives.
        """
        ...
