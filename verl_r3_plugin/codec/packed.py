"""`packed`: ceil(log2 E) bits an id, order kept, no gap between rows. For consumers that need the rollout engine's own order."""

from __future__ import annotations

import numpy as np

from ..schema import RouteSchema
from .bits import body_bytes, pack, unpack
from .raw import check_rows


class PackedEncoding:
    name = "packed"

    def body_bytes(self, rows: int, schema: RouteSchema) -> int:
        return body_bytes(rows * schema.num_moe_layers * schema.top_k, _bits(schema))

    def encode(self, ids: np.ndarray, schema: RouteSchema) -> bytes:
        return pack(ids.reshape(-1).astype(np.uint64), None, _bits(schema))

    def decode(self, body: np.ndarray, schema: RouteSchema, rows: np.ndarray, layers: np.ndarray) -> np.ndarray:
        top_k = schema.top_k
        columns = (layers[:, None] * top_k + np.arange(top_k)).reshape(-1)
        low, _ = unpack(body, rows, columns, schema.num_moe_layers * top_k, _bits(schema))
        ids = low.astype(schema.id_dtype).reshape(len(rows), len(layers), top_k)
        check_rows(ids, schema)
        return ids


def _bits(schema: RouteSchema) -> int:
    return (schema.num_experts - 1).bit_length()
