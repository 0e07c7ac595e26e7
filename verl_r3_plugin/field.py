"""Trajectories <-> the one field of a batch that carries routes: a row's own, self-contained envelope.

A batch row carries its routes itself, so every operation that a host applies to rows (select, repeat, reorder, split, pad) keeps the two
together. Hosts also clone rows as padding and write other tokens into them; the envelope's token count and hash give that away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import codec
from .routes import RoutedExperts
from .schema import RouteSchema
from .trajectory import Trajectory

FIELD = "r3_routes"
EMPTY = b""  # a row without routes, where the host wants every row to have the field

NO_ROUTES = "the row carries no routes"
OTHER_TOKENS = "the routes belong to other tokens (a padding row that a host cloned from another sample)"


def pack(trajectory: Trajectory | None, *, encoding: str = "set", last_trained: int | None = None) -> bytes:
    """The value of the field for one batch row; EMPTY for a row without routes.

    last_trained: index, among the trajectory's tokens, of the last one that is trained on.
    """
    if trajectory is None or not trajectory.routes.present.any():
        return EMPTY
    return trajectory.encode(encoding, last_trained)


def unpack(
    blob: bytes | np.ndarray | None,
    token_ids: Sequence[int] | np.ndarray,
    *,
    schema: RouteSchema,
    rows: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[RoutedExperts, str | None]:
    """Routes of one batch row, and why there are none (NO_ROUTES, OTHER_TOKENS), else None.

    token_ids: the row's tokens without padding. rows: indices of the tokens wanted (default: all); layers: ordinals of the MoE layers
    wanted. What is not wanted is not decoded. Rows that the envelope does not hold are absent. CodecError where bytes don't decode.
    """
    wanted = np.arange(len(token_ids)) if rows is None else np.asarray(rows, np.int64)
    result_schema = schema if layers is None else schema.select_layers(layers)
    if blob is None or len(blob) == 0:
        return RoutedExperts.absent(result_schema, len(wanted)), NO_ROUTES
    header = codec.read_header(blob)
    if header.token_count != len(token_ids) or header.token_hash != codec.token_hash(token_ids):
        return RoutedExperts.absent(result_schema, len(wanted)), OTHER_TOKENS
    held = (wanted >= header.start) & (wanted < header.start + header.rows)
    found = codec.decode(blob, schema=schema, rows=wanted[held] - header.start, layers=layers)
    if held.all():
        return found, None
    routes = RoutedExperts.absent(result_schema, len(wanted))
    routes.ids[held] = found.ids
    routes.present[held] = found.present
    return routes, None


def column(blobs: Sequence[bytes | None]) -> np.ndarray:
    """Object array [rows] of the field, as DataProto's `non_tensor_batch` holds it."""
    array = np.empty(len(blobs), object)
    array[:] = blobs
    return array
