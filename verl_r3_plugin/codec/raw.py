"""`raw`: ids in the narrowest dtype, little-endian, order kept. For debugging, and where a few bytes more don't matter."""

from __future__ import annotations

import numpy as np

from ..errors import CodecError
from ..schema import RouteSchema
from .encoding import check_rows
from .faults import RankOutOfRange


class RawEncoding:
    name = "raw"

    def body_bytes(self, rows: int, schema: RouteSchema) -> int:
        return rows * schema.num_moe_layers * schema.top_k * schema.id_dtype.itemsize

    def encode(self, ids: np.ndarray, schema: RouteSchema) -> bytes:
        check_rows(ids, schema, CodecError)
        return np.ascontiguousarray(ids, schema.id_dtype.newbyteorder("<")).tobytes()

    def decode(self, body: np.ndarray, rows_total: int, schema: RouteSchema, rows: np.ndarray, layers: np.ndarray) -> np.ndarray:
        shape = (rows_total, schema.num_moe_layers, schema.top_k)
        table = np.ascontiguousarray(body).view(schema.id_dtype.newbyteorder("<")).reshape(shape)
        ids = table[rows[:, None], layers].astype(schema.id_dtype)
        check_rows(ids, schema, RankOutOfRange)
        return ids
