"""`raw`: ids in the narrowest dtype, little-endian, order kept. For debugging, and where a few bytes more don't matter."""

from __future__ import annotations

import numpy as np

from ..routes import valid_rows
from ..schema import RouteSchema
from .encoding import RankOutOfRange


class RawEncoding:
    name = "raw"

    def body_bytes(self, rows: int, schema: RouteSchema) -> int:
        return rows * schema.num_moe_layers * schema.top_k * schema.id_dtype.itemsize

    def encode(self, ids: np.ndarray, schema: RouteSchema) -> bytes:
        return np.ascontiguousarray(ids, schema.id_dtype.newbyteorder("<")).tobytes()

    def decode(self, body: np.ndarray, schema: RouteSchema, rows: np.ndarray, layers: np.ndarray) -> np.ndarray:
        shape = (-1, schema.num_moe_layers, schema.top_k)
        table = np.ascontiguousarray(body).view(schema.id_dtype.newbyteorder("<")).reshape(shape)
        ids = table[rows[:, None], layers].astype(schema.id_dtype)
        check_rows(ids, schema)
        return ids


def check_rows(ids: np.ndarray, schema: RouteSchema) -> None:
    """RankOutOfRange unless every row of [rows, layers, top_k] holds ids of experts, none of them twice in a layer."""
    good = valid_rows(ids, schema.num_experts)
    if not good.all():
        row = int(good.argmin())
        raise RankOutOfRange(
            f"expected different expert ids below {schema.num_experts} in each layer, found {ids[row].tolist()} at decoded row {row}"
        )
