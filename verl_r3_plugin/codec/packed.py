"""`packed`: ceil(log2 E) bits an id, order kept, no gap between rows. For consumers that need the rollout engine's own order."""

from __future__ import annotations

import numpy as np

from ..errors import CodecError
from ..schema import RouteSchema
from .bits import body_bytes, check_padding, pack, unpack
from .encoding import check_rows
from .faults import RankOutOfRange


class PackedEncoding:
    name = "packed"

    def body_bytes(self, rows: int, schema: RouteSchema) -> int:
        return body_bytes(rows * schema.num_moe_layers * schema.top_k, _bits(schema))

    def encode(self, ids: np.ndarray, schema: RouteSchema) -> bytes:
        check_rows(ids, schema, CodecError)
        return pack(ids.reshape(-1).astype(np.uint64), None, _bits(schema))

    def decode(self, body: np.ndarray, rows_total: int, schema: RouteSchema, rows: np.ndarray, layers: np.ndarray) -> np.ndarray:
        top_k, per_row = schema.top_k, schema.num_moe_layers * schema.top_k
        check_padding(body, rows_total * per_row, _bits(schema))
        columns = (layers[:, None] * top_k + np.arange(top_k)).reshape(-1)
        low, _ = unpack(body, rows, columns, per_row, _bits(schema))
        ids = low.astype(schema.id_dtype).reshape(len(rows), len(layers), top_k)
        check_rows(ids, schema, RankOutOfRange)
        return ids


def _bits(schema: RouteSchema) -> int:
    return (schema.num_experts - 1).bit_length()
