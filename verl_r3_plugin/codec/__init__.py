"""Bytes <-> RoutedExperts. `envelope.py` is the format; each encoding of the rows is a file of its own."""

from .encoding import Encoding, RankOutOfRange
from .envelope import (
    BadHeader,
    BadMagic,
    ChecksumMismatch,
    Header,
    SchemaMismatch,
    TrailingBytes,
    TruncatedEnvelope,
    UnknownEncoding,
    UnsupportedVersion,
    decode,
    encode,
    read_header,
    token_hash,
)

__all__ = [
    "BadHeader",
    "BadMagic",
    "ChecksumMismatch",
    "Encoding",
    "Header",
    "RankOutOfRange",
    "SchemaMismatch",
    "TrailingBytes",
    "TruncatedEnvelope",
    "UnknownEncoding",
    "UnsupportedVersion",
    "decode",
    "encode",
    "read_header",
    "token_hash",
]
