"""Fields of a fixed number of bits, one after another without a gap: bit j of field i is bit `i * bits + j` of the body, the lowest
bit of a byte first. The last byte is filled up with zero bits. Fields of up to 128 bits are held as two uint64 arrays, low and high.
"""

from __future__ import annotations

import numpy as np

from ..compiled import kernels_for
from .faults import NonzeroPadding

_CHUNK = 1 << 16  # fields spread to single bits at a time by the numpy path: bounds its memory to about 10 MB


def body_bytes(fields: int, bits: int) -> int:
    """Bytes of a body with this many fields."""
    return (fields * bits + 7) // 8


def check_padding(body: np.ndarray, fields: int, bits: int) -> None:
    """NonzeroPadding unless the bits after the last field are zero."""
    used = fields * bits % 8
    if used and body[-1] >> used:
        raise NonzeroPadding(f"expected zero bits after the last of {fields} fields of {bits} bits, found a last byte of {body[-1]:#04x}")


def pack(low: np.ndarray, high: np.ndarray | None, bits: int) -> bytes:
    """Body of the fields low + high * 2**64 (uint64 [fields]); high is None up to 64 bits."""
    fields = len(low)
    if kernels := kernels_for(fields):
        words = np.zeros(fields * bits // 64 + 3, "<u8")
        kernels.write_fields(low, low if high is None else high, bits, words)
        return words.view(np.uint8)[: body_bytes(fields, bits)].tobytes()
    if fields <= _CHUNK:
        return np.packbits(_spread(low, high, bits), bitorder="little").tobytes()
    # A chunk is a multiple of eight fields, so each ends at a byte.
    return b"".join(pack(low[i : i + _CHUNK], None if high is None else high[i : i + _CHUNK], bits) for i in range(0, fields, _CHUNK))


def unpack(body: np.ndarray, rows: np.ndarray, columns: np.ndarray, per_row: int, bits: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Fields at every (row, column) of a table with `per_row` fields a row, as (low, high), uint64 [rows * columns].

    body: uint8 [bytes]; rows, columns: int64. Only the bytes of the asked fields are read.
    """
    fields = len(rows) * len(columns)
    if fields:
        # Cut to the rows asked for, since both paths below copy the body to have room behind it. Row numbers stay whole bytes apart.
        lowest, highest = int(rows.min()) // 8 * 8, int(rows.max()) + 1
        body = body[lowest * per_row * bits // 8 : body_bytes(highest * per_row, bits)]
        rows = rows - lowest
    if kernels := kernels_for(fields):
        words = np.zeros(len(body) // 8 + 3, "<u8")
        words.view(np.uint8)[: len(body)] = body
        low = np.empty(fields, np.uint64)
        high = np.empty(fields if bits > 64 else 0, np.uint64)
        kernels.read_fields(words, rows, columns, per_row, bits, low, high)
        return low, high if bits > 64 else None
    first = ((rows[:, None] * per_row + columns) * bits).reshape(-1)
    padded = np.concatenate([body, np.zeros(24, np.uint8)])
    low = np.empty(fields, np.uint64)
    high = np.empty(fields, np.uint64) if bits > 64 else None
    for i in range(0, fields, _CHUNK):
        low[i : i + _CHUNK] = _read_64(padded, first[i : i + _CHUNK], min(bits, 64))
        if high is not None:
            high[i : i + _CHUNK] = _read_64(padded, first[i : i + _CHUNK] + 64, bits - 64)
    return low, high


def _spread(low: np.ndarray, high: np.ndarray | None, bits: int) -> np.ndarray:
    """[fields, bits] uint8 of zeros and ones, lowest bit first."""
    spread = np.unpackbits(low.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    if high is not None:
        upper = np.unpackbits(high.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
        spread = np.concatenate([spread, upper], axis=1)
    return spread[:, :bits]


def _read_64(padded: np.ndarray, first_bit: np.ndarray, bits: int) -> np.ndarray:
    """`bits` (at most 64) bits from each `first_bit` on, as uint64."""
    window = padded[(first_bit >> 3)[:, None] + np.arange(9)]
    shift = (first_bit & 7).astype(np.uint64)
    value = np.ascontiguousarray(window[:, :8]).view("<u8")[:, 0] >> shift
    # A shift by 64 is undefined, so the ninth byte is moved up in two steps.
    value |= (window[:, 8].astype(np.uint64) << np.uint64(1)) << (np.uint64(63) - shift)
    return value & np.uint64((1 << bits) - 1)
