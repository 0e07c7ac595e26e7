"""The envelope: routes of one run of tokens as self-contained, checksummed bytes.

Written where routes are captured and packed, read by the actor; nothing else depends on the layout. Little-endian:

    offset  size  field
    0       4     magic "R3EV"
    4       1     version (1)
    5       1     flags: bit 0 = every row is present (no bitmap)
    6       1     length of the encoding's name
    7       1     top_k
    8       4     num_experts
    12      2     num_layers
    14      2     zero
    16      4     start: index of the token that row 0 belongs to
    20      4     rows
    24      4     present rows: rows held in the body
    28      4     token_count: tokens of the whole trajectory
    32      8     token_hash: xxh3_64 of all its token ids as uint32
    40      8     length of the body
    48      -     name (ASCII), MoE layers (bitmap of num_layers bits), presence (bitmap of `rows` bits, unless flagged), body
    end-8   8     checksum: xxh3_64 of all before it

Reading is strict: each kind of damage is an error of its own, lengths are compared before anything is allocated, and nothing half
decoded leaves this file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from .. import plugins
from ..errors import CodecError, ConfigError, SchemaError
from ..routes import RoutedExperts
from ..schema import RouteSchema

MAGIC = b"R3EV"
VERSION = 1
_FIXED = struct.Struct("<4sBBBBIHHIIIIQQ")
_CHECKSUM = struct.Struct("<Q")
_ALL_PRESENT = 1
_UINT32 = (1 << 32) - 1


class BadMagic(CodecError):
    """The bytes do not begin like an envelope."""


class UnsupportedVersion(CodecError):
    """An envelope of a later version of this package."""


class UnknownEncoding(CodecError):
    """No installed package offers the encoding that the envelope names."""


class BadHeader(CodecError):
    """Header fields that contradict each other."""


class SchemaMismatch(CodecError):
    """Routes of another model than the one they are wanted for."""


class TruncatedEnvelope(CodecError):
    """Fewer bytes than the header announces."""


class TrailingBytes(CodecError):
    """More bytes than the header announces."""


class ChecksumMismatch(CodecError):
    """The bytes were changed on their way."""


@dataclass(frozen=True)
class Header:
    """What an envelope says about itself.

    start: index of the token that row 0 belongs to; rows: rows in range; present_rows: those of them held in the body;
    token_count, token_hash: of the whole trajectory, so that a row that was cloned onto other tokens is noticed.
    """

    schema: RouteSchema
    start: int
    rows: int
    present_rows: int
    token_count: int
    token_hash: int
    encoding: str
    body_bytes: int
    total_bytes: int


def token_hash(token_ids: Sequence[int] | np.ndarray) -> int:
    """xxh3_64 of token ids as little-endian uint32."""
    return xxhash.xxh3_64_intdigest(np.asarray(token_ids).astype("<u4").tobytes())


def encode(routes: RoutedExperts, *, start: int = 0, token_count: int, token_hash: int, encoding: str = "set") -> bytes:
    """The envelope of `routes`, whose first row is that of token `start` of a trajectory of `token_count` tokens."""
    rows = len(routes)
    if not 0 <= start <= start + rows <= token_count <= _UINT32:
        raise CodecError(f"expected rows within the trajectory's {token_count} tokens, found rows {start} to {start + rows}")
    schema, codec = routes.schema, plugins.encoding(encoding)
    all_present = bool(routes.present.all())
    body = codec.encode(routes.ids if all_present else routes.ids[routes.present], schema)
    name = encoding.encode("ascii")
    layers = np.zeros(schema.num_layers, np.bool_)
    layers[list(schema.moe_layers)] = True
    parts = [
        _FIXED.pack(
            MAGIC, VERSION, _ALL_PRESENT * all_present, len(name), schema.top_k, schema.num_experts, schema.num_layers, 0,
            start, rows, int(routes.present.sum()), token_count, token_hash, len(body),
        ),
        name,
        np.packbits(layers, bitorder="little").tobytes(),
        b"" if all_present else np.packbits(routes.present, bitorder="little").tobytes(),
        body,
    ]  # fmt: skip
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join([*parts, _CHECKSUM.pack(checksum.intdigest())])


def read_header(data: bytes | bytearray | memoryview | np.ndarray) -> Header:
    """Header of an envelope whose every byte was checked; decodes no row."""
    return _open(data).header


def decode(
    data: bytes | bytearray | memoryview | np.ndarray,
    *,
    schema: RouteSchema | None = None,
    rows: slice | np.ndarray | None = None,
    layers: Sequence[int] | None = None,
) -> RoutedExperts:
    """Routes of an envelope.

    schema: refuse routes of another (SchemaMismatch). rows: only these, relative to the envelope's first row; layers: only these
    ordinals of `moe_layers`, and the result then has `schema.select_layers(layers)`. What is not asked for is not decoded.
    """
    opened = _open(data)
    header = opened.header
    if schema is not None and header.schema != schema:
        raise SchemaMismatch(f"expected routes of {_describe(schema)}, found routes of {_describe(header.schema)}")
    wanted = np.arange(header.rows) if rows is None else _row_indices(rows, header.rows)
    present = opened.present[wanted]
    stored = (np.cumsum(opened.present) - 1)[wanted[present]] if not opened.present.all() else wanted[present]
    ordinals = range(header.schema.num_moe_layers) if layers is None else list(layers)
    result_schema = header.schema if layers is None else header.schema.select_layers(ordinals)
    codec = _encoding(header.encoding)
    found = codec.decode(opened.body, header.schema, stored.astype(np.int64), np.asarray(ordinals, np.int64))
    if present.all():
        return RoutedExperts(result_schema, found, present)
    ids = np.zeros((len(wanted), *found.shape[1:]), found.dtype)
    ids[present] = found
    return RoutedExperts(result_schema, ids, present)


@dataclass(frozen=True)
class _Opened:
    header: Header
    present: np.ndarray
    body: np.ndarray


def _open(data: bytes | bytearray | memoryview | np.ndarray) -> _Opened:
    view = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
    if view.dtype != np.uint8 or view.ndim != 1:
        raise CodecError(f"expected bytes, found an array of {view.dtype} with {view.ndim} dimensions")
    start_bytes = view[:4].tobytes()
    if start_bytes != MAGIC[: len(start_bytes)]:
        raise BadMagic(f"expected an envelope, which begins with {MAGIC!r}, found {start_bytes!r}")
    if len(view) > 4 and view[4] != VERSION:
        raise UnsupportedVersion(f"expected envelope version {VERSION}, found {view[4]}; install a verl-r3-plugin that knows it")
    if len(view) < _FIXED.size + _CHECKSUM.size:
        raise TruncatedEnvelope(f"expected at least {_FIXED.size + _CHECKSUM.size} bytes, found {len(view)}")
    (_, _, flags, name_bytes, top_k, experts, num_layers, zero, start, rows, present_rows, tokens, hashed, body_bytes) = _FIXED.unpack(
        view[: _FIXED.size].tobytes()
    )
    all_present = bool(flags & _ALL_PRESENT)
    layer_bytes, presence_bytes = (num_layers + 7) // 8, 0 if all_present else (rows + 7) // 8
    total = _FIXED.size + name_bytes + layer_bytes + presence_bytes + body_bytes + _CHECKSUM.size
    if len(view) < total:
        raise TruncatedEnvelope(f"expected {total} bytes, as the header announces, found {len(view)}")
    if len(view) > total:
        raise TrailingBytes(f"expected {total} bytes, as the header announces, found {len(view)}")
    (expected,) = _CHECKSUM.unpack(view[-_CHECKSUM.size :].tobytes())
    found = xxhash.xxh3_64_intdigest(memoryview(np.ascontiguousarray(view[: -_CHECKSUM.size])))
    if expected != found:
        raise ChecksumMismatch(f"expected checksum {expected:016x}, found {found:016x}")
    if flags & ~_ALL_PRESENT or zero:
        raise BadHeader(f"expected unused flags and bytes to be zero, found flags {flags:#x} and {zero:#x}")
    if not start + rows <= tokens or not present_rows <= rows or (all_present and present_rows != rows):
        raise BadHeader(
            f"expected present rows <= rows <= tokens, found {present_rows} present of {rows} rows from token {start} on "
            f"in a trajectory of {tokens}"
        )
    at = _FIXED.size
    name = view[at : at + name_bytes].tobytes()
    at += name_bytes
    moe_layers = _bitmap(view[at : at + layer_bytes], num_layers, "MoE layers").nonzero()[0]
    at += layer_bytes
    if all_present:
        present = np.ones(rows, np.bool_)
    else:
        present = _bitmap(view[at : at + presence_bytes], rows, "presence")
    at += presence_bytes
    if present.sum() != present_rows:
        raise BadHeader(f"expected {present_rows} present rows, as the header announces, found {present.sum()} in the bitmap")
    try:
        schema = RouteSchema(experts, top_k, num_layers, tuple(moe_layers.tolist()))
    except SchemaError as error:
        raise BadHeader(f"the envelope describes no model: {error}") from error
    encoding = name.decode("ascii", errors="replace")
    body = view[at : at + body_bytes]
    codec = _encoding(encoding)
    if body_bytes != (needed := codec.body_bytes(present_rows, schema)):
        raise BadHeader(f"expected a body of {needed} bytes for {present_rows} rows as {encoding!r}, found {body_bytes}")
    header = Header(schema, start, rows, present_rows, tokens, hashed, encoding, body_bytes, total)
    return _Opened(header, present, body)


def _encoding(name: str):
    try:
        return plugins.encoding(name)
    except ConfigError as error:
        raise UnknownEncoding(
            f"expected an encoding that an installed package offers in entry-point group {plugins.ENTRY_POINT_GROUP!r} "
            f"({', '.join(plugins.names('r3_encodings'))}), found {name!r}"
        ) from error


def _bitmap(packed: np.ndarray, size: int, what: str) -> np.ndarray:
    bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    if bits[size:].any():
        raise BadHeader(f"expected zero bits after the {size} of the {what} bitmap, found others")
    return bits[:size]


def _row_indices(rows: slice | np.ndarray, total: int) -> np.ndarray:
    if isinstance(rows, slice):
        return np.arange(total)[rows]
    rows = np.asarray(rows)
    if rows.size and (rows.min() < 0 or rows.max() >= total):
        raise CodecError(f"expected rows within 0 to {total - 1}, found {rows.min()} to {rows.max()}")
    return rows.astype(np.int64)


def _describe(schema: RouteSchema) -> str:
    layers = schema.moe_layers
    return f"top-{schema.top_k} of {schema.num_experts} experts in {len(layers)} MoE layers of {schema.num_layers}"
