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
from .encoding import Encoding
from .faults import (
    BadHeader,
    BadMagic,
    ChecksumMismatch,
    SchemaMismatch,
    TrailingBytes,
    TruncatedEnvelope,
    UnknownEncoding,
    UnsupportedVersion,
)

MAGIC = b"R3EV"
VERSION = 1
MAX_TOKENS = 1 << 28  # no context is that long; bounds what a header alone can make a reader allocate
_FIXED = struct.Struct("<4sBBBBIHHIIIIQQ")
_CHECKSUM = struct.Struct("<Q")
_ALL_PRESENT = 1

Buffer = bytes | bytearray | memoryview | np.ndarray


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
    ids = np.asarray(token_ids)
    if ids.size and ids.dtype.kind not in "iu":
        raise CodecError(f"expected integer token ids, found {ids.dtype}")
    return xxhash.xxh3_64_intdigest(ids.astype("<u4").tobytes())


def encode(routes: RoutedExperts, *, start: int = 0, token_count: int, token_hash: int, encoding: str = "set") -> bytes:
    """The envelope of `routes`, whose first row is that of token `start` of a trajectory of `token_count` tokens."""
    rows = len(routes)
    if not 0 <= start <= start + rows <= token_count <= MAX_TOKENS:
        raise CodecError(f"expected rows within a trajectory of {token_count} tokens, found rows {start} to {start + rows}")
    if not 0 <= token_hash < 1 << 64:
        raise CodecError(f"expected a token hash of 64 bits, as `token_hash` gives, found {token_hash}")
    schema, codec = routes.schema, plugins.encoding(encoding)
    name = encoding.encode("ascii", errors="replace")
    if name.decode("ascii") != encoding or len(name) > 255:
        raise CodecError(f"expected an encoding's name to be at most 255 ASCII characters, found {encoding!r}")
    present_rows = int(np.count_nonzero(routes.present))
    all_present = present_rows == rows
    body = codec.encode(routes.ids if all_present else routes.ids[routes.present], schema)
    if (needed := _body_bytes(codec, present_rows, schema)) not in (None, len(body)):
        raise CodecError(f"encoding {encoding!r} promised a body of {needed} bytes for {present_rows} rows and made one of {len(body)}")
    layers = np.zeros(schema.num_layers, np.bool_)
    layers[list(schema.moe_layers)] = True
    parts = [
        _FIXED.pack(
            MAGIC, VERSION, _ALL_PRESENT * all_present, len(name), schema.top_k, schema.num_experts, schema.num_layers, 0,
            start, rows, present_rows, token_count, token_hash, len(body),
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


def read_header(data: Buffer) -> Header:
    """Header of an envelope whose checksum and lengths were verified; decodes no row."""
    return _open(data).header


def envelope_bytes(data: Buffer) -> int:
    """Length that the envelope at the beginning of `data` announces, where others may follow; nothing else is verified."""
    return _announced(_bytes_of(data))[0]


def decode(
    data: Buffer,
    *,
    schema: RouteSchema | None = None,
    rows: slice | np.ndarray | None = None,
    layers: Sequence[int] | None = None,
) -> RoutedExperts:
    """Routes of an envelope.

    schema: refuse routes of another (SchemaMismatch). rows: only these (a slice, indices in any order, or a bool mask), relative to
    the envelope's first row; layers: only these ordinals of `moe_layers`, ascending, and the result then has
    `schema.select_layers(layers)`. What is not asked for is not decoded.
    """
    opened = _open(data)
    header = opened.header
    if schema is not None and header.schema != schema:
        raise SchemaMismatch(f"expected routes of {_describe(schema)}, found routes of {_describe(header.schema)}")
    ordinals = range(header.schema.num_moe_layers) if layers is None else list(layers)
    result_schema = header.schema if layers is None else header.schema.select_layers(ordinals)
    wanted = _row_indices(rows, header.rows)
    if opened.present is None:
        present, stored = np.ones(len(wanted), np.bool_), wanted
    else:
        present = opened.present[wanted]
        stored = (np.cumsum(opened.present) - 1)[wanted[present]]
    codec = _encoding(header.encoding)
    found = codec.decode(opened.body, header.present_rows, header.schema, stored, np.asarray(ordinals, np.int64))
    if len(stored) == len(wanted):
        return RoutedExperts(result_schema, found, present)
    ids = np.zeros((len(wanted), *found.shape[1:]), found.dtype)
    ids[present] = found
    return RoutedExperts(result_schema, ids, present)


@dataclass(frozen=True)
class _Opened:
    header: Header
    present: np.ndarray | None  # bool [rows]; None: all are
    body: np.ndarray  # uint8


def _open(data: Buffer) -> _Opened:
    view = _bytes_of(data)
    total, fields = _announced(view)
    if len(view) < total:
        raise TruncatedEnvelope(f"expected {total} bytes, as the header announces, found {len(view)}")
    if len(view) > total:
        raise TrailingBytes(f"expected {total} bytes, as the header announces, found {len(view)}")
    (expected,) = _CHECKSUM.unpack(view[-_CHECKSUM.size :].tobytes())
    found = xxhash.xxh3_64_intdigest(memoryview(view[: -_CHECKSUM.size]))
    if expected != found:
        raise ChecksumMismatch(f"expected checksum {expected:016x}, found {found:016x}")
    flags, name_bytes, top_k, experts, num_layers, zero, start, rows, present_rows, tokens, hashed, body_bytes = fields
    all_present = bool(flags & _ALL_PRESENT)
    if flags & ~_ALL_PRESENT or zero:
        raise BadHeader(f"expected unused flags and bytes to be zero, found flags {flags:#x} and {zero:#x}")
    if not start + rows <= tokens <= MAX_TOKENS or (present_rows != rows if all_present else present_rows >= rows):
        raise BadHeader(
            f"expected at most {MAX_TOKENS} tokens, all rows within them, and as many rows present as the flags say, found {present_rows} "
            f"present of {rows} rows from token {start} on in a trajectory of {tokens}, {'all' if all_present else 'not all'} present"
        )
    at = _FIXED.size
    name, at = view[at : at + name_bytes].tobytes(), at + name_bytes
    moe_layers, at = _bitmap(view[at:], num_layers, "MoE layers").nonzero()[0], at + _bitmap_bytes(num_layers)
    present = None if all_present else _bitmap(view[at:], rows, "presence")
    at += 0 if all_present else _bitmap_bytes(rows)
    if present is not None and np.count_nonzero(present) != present_rows:
        raise BadHeader(f"expected {present_rows} present rows, as the header announces, found {present.sum()} in the bitmap")
    try:
        schema = RouteSchema(experts, top_k, num_layers, tuple(moe_layers.tolist()))
        encoding = name.decode("ascii")
    except (SchemaError, UnicodeDecodeError) as error:
        raise BadHeader(f"the envelope describes no model or names no encoding: {error}") from error
    needed = _body_bytes(_encoding(encoding), present_rows, schema)
    if needed not in (None, body_bytes):
        raise BadHeader(f"expected a body of {needed} bytes for {present_rows} rows as {encoding!r}, found {body_bytes}")
    header = Header(schema, start, rows, present_rows, tokens, hashed, encoding, body_bytes, total)
    return _Opened(header, present, view[at : at + body_bytes])


def _bytes_of(data: Buffer) -> np.ndarray:
    """uint8 [bytes] over the same memory, where it is contiguous."""
    if not isinstance(data, np.ndarray):
        try:
            data = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        except TypeError as error:
            raise CodecError(f"expected the bytes of an envelope, found {type(data).__name__} ({error})") from error
    if data.dtype != np.uint8 or data.ndim != 1:
        raise CodecError(f"expected bytes, found an array of {data.dtype} with {data.ndim} dimensions")
    return np.ascontiguousarray(data)


def _announced(view: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Total length that the header announces, and the header's fields from the flags on."""
    start_bytes = view[:4].tobytes()
    if start_bytes != MAGIC[: len(start_bytes)]:
        raise BadMagic(f"expected an envelope, which begins with {MAGIC!r}, found {start_bytes!r}")
    if len(view) > 4 and view[4] != VERSION:
        raise UnsupportedVersion(f"expected envelope version {VERSION}, found {view[4]}; install a verl-r3-plugin that knows it")
    if len(view) < _FIXED.size + _CHECKSUM.size:
        raise TruncatedEnvelope(f"expected at least {_FIXED.size + _CHECKSUM.size} bytes, found {len(view)}")
    fields = _FIXED.unpack(view[: _FIXED.size].tobytes())[2:]
    flags, name_bytes, _, _, num_layers, _, _, rows, _, _, _, body_bytes = fields
    presence_bytes = 0 if flags & _ALL_PRESENT else _bitmap_bytes(rows)
    return _FIXED.size + name_bytes + _bitmap_bytes(num_layers) + presence_bytes + body_bytes + _CHECKSUM.size, fields


def _encoding(name: str) -> Encoding:
    try:
        return plugins.encoding(name)
    except ConfigError as error:
        raise UnknownEncoding(
            f"expected an encoding that an installed package offers in entry-point group {plugins.ENTRY_POINT_GROUP!r} "
            f"({', '.join(plugins.names('r3_encodings'))}), found {name!r}; install the package that wrote these routes"
        ) from error


def _body_bytes(codec: Encoding, rows: int, schema: RouteSchema) -> int | None:
    # An encoding of another package may leave it out, if its bodies have no length that can be foretold.
    foretell = getattr(codec, "body_bytes", None)
    return None if foretell is None else foretell(rows, schema)


def _bitmap_bytes(size: int) -> int:
    return (size + 7) // 8


def _bitmap(view: np.ndarray, size: int, what: str) -> np.ndarray:
    """bool [size] from the beginning of `view`."""
    bits = np.unpackbits(view[: _bitmap_bytes(size)], bitorder="little").astype(np.bool_)
    if bits[size:].any():
        raise BadHeader(f"expected zero bits after the {size} of the {what} bitmap, found others")
    return bits[:size]


def _row_indices(rows: slice | np.ndarray | None, total: int) -> np.ndarray:
    """int64 indices of the rows asked for."""
    if rows is None or isinstance(rows, slice):
        return np.arange(total, dtype=np.int64)[slice(None) if rows is None else rows]
    rows = np.asarray(rows)
    if rows.dtype == np.bool_:
        if rows.shape != (total,):
            raise CodecError(f"expected a mask of the envelope's {total} rows, found one of shape {rows.shape}")
        return rows.nonzero()[0]
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise CodecError(f"expected row indices in one dimension, found {rows.dtype} of shape {rows.shape}")
    if rows.size and (rows.min() < 0 or rows.max() >= total):
        raise CodecError(f"expected rows within the envelope's {total}, found {rows.min()} to {rows.max()}")
    return rows.astype(np.int64)


def _describe(schema: RouteSchema) -> str:
    layers = schema.moe_layers
    return f"top-{schema.top_k} of {schema.num_experts} experts in MoE layers {_ranges(layers)} of {schema.num_layers}"


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
