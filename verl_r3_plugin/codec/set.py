"""`set`: each layer's K ids as an unordered set, in ceil(log2 C(E, K)) bits; the default.

Megatron scatters the ids into a map, so their order carries nothing, and leaving it out is worth log2 K! bits a layer (15 for
top-8). Fields run on across layers and rows, and all have the same width: any row and layer can be decoded alone.
"""

from __future__ import annotations

import numpy as np

from ..schema import RouteSchema
from .bits import body_bytes, check_padding, pack, unpack
from .combinations import Combinations, combinations
from .faults import RankOutOfRange


class SetEncoding:
    name = "set"

    def body_bytes(self, rows: int, schema: RouteSchema) -> int:
        return body_bytes(rows * schema.num_moe_layers, _table(schema).bits)

    def encode(self, ids: np.ndarray, schema: RouteSchema) -> bytes:
        table = _table(schema)
        return pack(*table.rank(ids.reshape(-1, schema.top_k)), table.bits)

    def decode(self, body: np.ndarray, rows_total: int, schema: RouteSchema, rows: np.ndarray, layers: np.ndarray) -> np.ndarray:
        table = _table(schema)
        check_padding(body, rows_total * schema.num_moe_layers, table.bits)
        low, high = unpack(body, rows, layers, schema.num_moe_layers, table.bits)
        bad = table.first_out_of_range(low, high)
        if bad >= 0:
            row, layer = divmod(bad, len(layers))
            value = int(low[bad]) + (int(high[bad]) << 64 if high is not None else 0)
            raise RankOutOfRange(
                f"expected the rank of a set of {schema.top_k} out of {schema.num_experts} experts, below {table.count}, "
                f"found {value} at decoded row {row}, layer {layer}"
            )
        return table.unrank(low, high, schema.id_dtype).reshape(len(rows), len(layers), schema.top_k)


def _table(schema: RouteSchema) -> Combinations:
    return combinations(schema.num_experts, schema.top_k)
