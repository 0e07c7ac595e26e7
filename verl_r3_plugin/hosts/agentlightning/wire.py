"""What the gateway hands to the trainer: the turns of one rollout attempt and their rows. Written by `store.py`, read by `manager.py`.

Body: msgpack array of `Turn` arrays. Header `X-R3-Checksum`: xxh3_64 of the body, hexadecimal.
"""

from __future__ import annotations

import msgspec
import xxhash

from ...errors import CodecError

CHECKSUM_HEADER = "X-R3-Checksum"
NO_PARENT = -1


class Turn(msgspec.Struct, array_like=True, frozen=True):
    """One sampled answer.

    parent: index of the earlier turn whose tokens this one's begin with, -1 if there is none; extent: rows before this index are that
    turn's too (all of its own, or only its prompt's where two answers share a prompt).
    start: index of the first row in `routes`. tokens, token_hash: count and hash of context and answer together.
    version: the model version of the endpoint that answered.
    routes: envelope of the rows from `start` on, b"" where none were captured. reason: why not.
    """

    parent: int
    extent: int
    start: int
    tokens: int
    token_hash: int
    version: int
    routes: bytes
    reason: str | None = None


def pack(turns: list[Turn]) -> tuple[bytes, str]:
    """(body, checksum)."""
    body = msgspec.msgpack.encode(turns)
    return body, checksum(body)


def unpack(body: bytes, expected: str | None) -> list[Turn]:
    """The turns; CodecError where the body is not what was sent."""
    if expected != (found := checksum(body)):
        raise CodecError(f"expected routes with checksum {expected}, found {found}; the gateway's answer was changed on its way")
    try:
        turns = msgspec.msgpack.decode(body, type=list[Turn])
    except msgspec.DecodeError as error:
        raise CodecError(f"expected the gateway's routes, found bytes that are not ({error})") from error
    for index, turn in enumerate(turns):
        if not NO_PARENT <= turn.parent < index:
            raise CodecError(f"expected turn {index} to continue an earlier one, found parent {turn.parent}")
    return turns


def checksum(body: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(body):016x}"
