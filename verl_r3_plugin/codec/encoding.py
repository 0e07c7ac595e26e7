"""What an encoding of route rows is, and the check that the encodings share."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..errors import CodecError
from ..routes import valid_rows
from ..schema import RouteSchema


class Encoding(Protocol):
    """Rows <-> bytes. An encoding sees present rows only; the envelope around it holds everything else."""

    name: str

    def body_bytes(self, rows: int, schema: RouteSchema) -> int | None:
        """Exact length of the body of this many rows, which the envelope then holds it to; None where it depends on the ids."""
        ...

    def encode(self, ids: np.ndarray, schema: RouteSchema) -> bytes:
        """Body of `ids` [rows, moe_layers, top_k], dtype `schema.id_dtype`. CodecError where a layer has an id twice or none of the
        model's: such a row should have been absent."""
        ...

    def decode(self, body: np.ndarray, rows_total: int, schema: RouteSchema, rows: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """ids [len(rows), len(layers), top_k], dtype `schema.id_dtype`, of the asked rows and layer ordinals (int64) alone.

        body: uint8, the encoding of `rows_total` rows, its length and checksum already verified. Raises RankOutOfRange for a stored
        value that no valid row gives, and NonzeroPadding for bits set after the last field.
        """
        ...


def check_rows(ids: np.ndarray, schema: RouteSchema, fault: type[CodecError]) -> None:
    """Raise `fault` unless every row of [rows, layers, top_k] holds ids of experts, none of them twice in a layer."""
    good = valid_rows(ids, schema.num_experts)
    if not good.all():
        row = int(good.argmin())
        ordered = np.sort(ids[row], axis=-1)
        bad_layers = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1) | (ordered[:, -1] >= schema.num_experts)
        layer = int(bad_layers.argmax())
        raise fault(
            f"expected different expert ids below {schema.num_experts}, found {ids[row, layer].tolist()} at row {row} and layer {layer} "
            "of those given; such a row must be absent"
        )
