"""Bytes <-> RoutedExperts. `envelope.py` is the format; each encoding of the rows is a file of its own."""

from .encoding import Encoding
from .envelope import MAGIC, Header, decode, encode, envelope_bytes, read_header, token_hash
from .faults import (
    BadHeader,
    BadMagic,
    ChecksumMismatch,
    NonzeroPadding,
    RankOutOfRange,
    SchemaMismatch,
    TrailingBytes,
    TruncatedEnvelope,
    UnknownEncoding,
    UnsupportedVersion,
)

__all__ = [
    "MAGIC",
    "BadHeader",
    "BadMagic",
    "ChecksumMismatch",
    "Encoding",
    "Header",
    "NonzeroPadding",
    "RankOutOfRange",
    "SchemaMismatch",
    "TrailingBytes",
    "TruncatedEnvelope",
    "UnknownEncoding",
    "UnsupportedVersion",
    "decode",
    "encode",
    "envelope_bytes",
    "read_header",
    "token_hash",
]
