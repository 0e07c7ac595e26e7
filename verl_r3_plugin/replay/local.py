"""Rows and layers of one micro-batch that belong to this rank, cut before anything is decoded.

A pipeline stage holds some of the layers, and a context- or sequence-parallel rank some of the tokens. Only those fields of an envelope
are read; what a rank does not need is never unpacked, copied or moved to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ReplayError
from ..field import unpack
from ..schema import RouteSchema


@dataclass(frozen=True, eq=False)
class LocalRoutes:
    """ids: [local_layers, local_tokens, top_k] in the schema's narrow dtype, zero where not valid.

    valid: [local_tokens] bool: the row is replayed; the others (absent rows, padding) are routed live.
    reasons: one a sequence, why none of its routes is used, or None.
    """

    ids: np.ndarray
    valid: np.ndarray
    reasons: tuple[str | None, ...]

    @classmethod
    def gather(
        cls,
        blobs: Sequence[bytes | None],
        token_ids: Sequence[np.ndarray],
        rows: np.ndarray,
        layers: Sequence[int],
        schema: RouteSchema,
    ) -> LocalRoutes:
        """Routes for this rank's tokens, in the order in which its routers see them.

        blobs: the field's value for each sequence of the micro-batch; token_ids: each sequence's ids without padding.
        rows: int64 [local_tokens], the token's number among the sequences laid end to end, or -1 for padding.
        layers: ordinals of this rank's MoE layers; none in a pipeline stage of dense layers, where nothing is read and no row is valid.
        """
        if len(blobs) != len(token_ids):
            raise ReplayError(f"expected one field value a sequence, found {len(blobs)} for {len(token_ids)} sequences")
        rows = np.asarray(rows, np.int64)
        bounds = np.concatenate([[0], np.cumsum([len(ids) for ids in token_ids])])
        if rows.size and rows.max() >= bounds[-1]:
            raise ReplayError(f"expected token numbers below {bounds[-1]}, found {rows.max()}")
        ids = np.zeros((len(layers), len(rows), schema.top_k), schema.id_dtype)
        valid = np.zeros(len(rows), np.bool_)
        if not layers:
            return cls(ids, valid, (None,) * len(blobs))
        reasons = []
        sequence = np.searchsorted(bounds, rows, side="right") - 1  # -1 where padding
        for index, (blob, tokens) in enumerate(zip(blobs, token_ids, strict=True)):
            here = (sequence == index).nonzero()[0]
            found, reason = unpack(blob, tokens, schema=schema, rows=rows[here] - bounds[index], layers=layers)
            ids[:, here] = found.ids.transpose(1, 0, 2)
            valid[here] = found.present
            reasons.append(reason)
        return cls(ids, valid, tuple(reasons))
