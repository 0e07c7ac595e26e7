"""The field inside VERL's batches: where it stands in a DataProto (v0) and in a TensorDict (workers, V1), and how it is read there."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import CodecError
from ...field import EMPTY, FIELD


def read_blobs(data: Any) -> list[bytes]:
    """One envelope a row of the TensorDict `data`, EMPTY where the row has no routes.

    v0 puts bytes (or None) into a NonTensorStack, which tensordict makes one NonTensorData where all rows are equal. V1 holds 1-D uint8
    tensors: jagged, or dense [rows, bytes] where all happen to be of one length.
    """
    import torch

    column = data.get(FIELD)
    if isinstance(column, torch.Tensor):
        rows = column.unbind()
        return [row.cpu().numpy().tobytes() for row in rows]
    values = column.tolist() if hasattr(column, "tolist") else column
    if not isinstance(values, list):
        values = [values] * len(data)
    return [_bytes(value) for value in values]


def _bytes(value: Any) -> bytes:
    if value is None:
        return EMPTY
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return value.tobytes()
    raise CodecError(f"expected the field {FIELD!r} to hold bytes or None, found {type(value).__name__}")
