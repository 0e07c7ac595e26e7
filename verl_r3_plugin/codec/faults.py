"""What can be wrong with bytes that should be an envelope: one class for each fault, so that a caller can tell damage from a mix-up."""

from __future__ import annotations

from ..errors import CodecError


class BadMagic(CodecError):
    """The bytes do not begin like an envelope."""


class UnsupportedVersion(CodecError):
    """An envelope of a later version of this package."""


class TruncatedEnvelope(CodecError):
    """Fewer bytes than the header announces."""


class TrailingBytes(CodecError):
    """More bytes than the header announces."""


class ChecksumMismatch(CodecError):
    """The bytes were changed on their way."""


class BadHeader(CodecError):
    """Header fields that contradict each other."""


class UnknownEncoding(CodecError):
    """No installed package offers the encoding that the envelope names."""


class SchemaMismatch(CodecError):
    """Routes of another model than the one they are wanted for."""


class RankOutOfRange(CodecError):
    """A stored value that stands for no expert, or for no set of experts."""


class NonzeroPadding(CodecError):
    """Bits set after the last field of a body."""
