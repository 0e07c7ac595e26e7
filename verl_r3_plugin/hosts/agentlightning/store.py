"""Routes that the gateway holds: encoded, per rollout and attempt, freed with the rollout, spilled to disk above a limit.

Several conversations may run in one attempt (sub-agents, retries, n > 1). So turns form a tree: each knows the earlier turn whose tokens
its own begin with, found by token hash, never by order of arrival.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from ...codec import token_hash
from . import wire


@dataclass
class HeldTurn:
    """A turn with what is needed to find its successors. known: rows held without a gap, from the first on."""

    parent: int
    extent: int
    start: int
    prompt_tokens: int
    prompt_hash: int
    tokens: int
    token_hash: int
    known: int
    version: int
    conversation: int  # digest of the request's messages
    routes: bytes | tuple[int, int]  # envelope, or (offset, length) in the attempt's spill file
    reason: str | None


@dataclass
class Attempt:
    """Turns of one attempt of one rollout, in order of arrival."""

    turns: list[HeldTurn] = field(default_factory=list)
    spill: Path | None = None
    appends_only: bool = False  # a continuation was seen whose context began with all tokens of the turn before


@dataclass(frozen=True)
class Continuation:
    """parent: turn whose tokens a prompt begins with (-1 if none); extent: rows before this index are the parent's or its parents'.

    known: those of them held without a gap; whole: the prompt begins with all of the parent's tokens, its answer's too.
    version: the parent's, None without a parent.
    """

    parent: int
    extent: int
    known: int
    whole: bool
    version: int | None


class RouteStore:
    """All attempts' turns. memory_limit: bytes of envelopes kept in memory; beyond it, the oldest attempts go to files."""

    def __init__(self, memory_limit: int, folder: str | None = None) -> None:
        self.memory_limit = memory_limit
        self.memory_bytes = 0
        self.spilled_bytes = 0
        self._folder = folder
        self._spill_root: Path | None = None
        self._attempts: dict[str, dict[str, Attempt]] = {}

    def attempt(self, rollout: str, attempt: str) -> Attempt:
        """The attempt's turns, made empty if there are none."""
        return self._attempts.setdefault(rollout, {}).setdefault(attempt, Attempt())

    def expected_start(self, rollout: str, attempt: str, digests: Sequence[int], version: int) -> int:
        """The row from which on to ask, before the prompt's tokens are known: it is guessed from the messages, and verified afterwards.

        digests: running digest after each message of the request. Until a continuation has shown that this conversation only ever
        appends, the guess stays within the earlier prompt, so that it can't lie beyond the new one (some vLLM versions die of that).
        """
        held = self._attempts.get(rollout, {}).get(attempt)
        if held is None:
            return 0
        order = {digest: position for position, digest in enumerate(digests)}
        candidates = [turn for turn in held.turns if turn.conversation in order]
        if not candidates:
            return 0
        longest = max(order[turn.conversation] for turn in candidates)
        starts = []
        for turn in candidates:
            if order[turn.conversation] == longest:
                # Asking again with the very same messages gives the same prompt, not a longer one.
                safe = turn.tokens - 1 if held.appends_only and longest < len(digests) - 1 else turn.prompt_tokens - 1
                starts.append(min(safe, turn.known) if turn.version == version else safe)
        return max(0, min(starts))

    def continuation(self, rollout: str, attempt: str, prompt: np.ndarray) -> Continuation:
        """The held turn with the most tokens in common with the beginning of `prompt`."""
        best = Continuation(wire.NO_PARENT, 0, 0, False, None)
        hashes: dict[int, int] = {}
        for index, turn in enumerate(self.attempt(rollout, attempt).turns):
            for length, expected, extent, whole in (
                (turn.tokens, turn.token_hash, turn.tokens - 1, True),
                (turn.prompt_tokens, turn.prompt_hash, turn.prompt_tokens, False),
            ):
                if not best.extent < extent <= length <= len(prompt):
                    continue
                if length not in hashes:
                    hashes[length] = token_hash(prompt[:length])
                if hashes[length] == expected:
                    best = Continuation(index, extent, min(turn.known, extent), whole, turn.version)
        return best

    def add(self, rollout: str, attempt: str, turn: HeldTurn) -> int:
        """Keep a turn; its index."""
        held = self.attempt(rollout, attempt)
        held.turns.append(turn)
        self.memory_bytes += len(turn.routes)
        if self.memory_bytes > self.memory_limit:
            self._spill()
        return len(held.turns) - 1

    def turns(self, rollout: str, attempt: str) -> list[wire.Turn]:
        """An attempt's turns as the trainer gets them."""
        held = self._attempts.get(rollout, {}).get(attempt)
        if held is None:
            return []
        return [
            wire.Turn(
                turn.parent, turn.extent, turn.start, turn.tokens, turn.token_hash, turn.version, self._bytes(held, turn), turn.reason
            )
            for turn in held.turns
        ]

    def free(self, rollout: str) -> None:
        """Forget a rollout."""
        for attempt in self._attempts.pop(rollout, {}).values():
            for turn in attempt.turns:
                if isinstance(turn.routes, bytes):
                    self.memory_bytes -= len(turn.routes)
                else:
                    self.spilled_bytes -= turn.routes[1]
            if attempt.spill is not None:
                attempt.spill.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the spill files."""
        if self._spill_root is not None:
            shutil.rmtree(self._spill_root, ignore_errors=True)

    @property
    def rollouts(self) -> int:
        return len(self._attempts)

    def _all(self) -> Iterator[tuple[str, str, Attempt]]:
        for rollout, attempts in self._attempts.items():
            for name, attempt in attempts.items():
                yield rollout, name, attempt

    def _spill(self) -> None:
        """Move whole attempts, oldest first, to files until half of the limit is free: few large writes, not one a turn."""
        if self._spill_root is None:
            self._spill_root = Path(tempfile.mkdtemp(prefix="verl-r3-", dir=self._folder))
        for number, (_, _, attempt) in enumerate(self._all()):
            if self.memory_bytes <= self.memory_limit // 2:
                return
            if attempt.spill is None:
                attempt.spill = self._spill_root / f"{number}-{id(attempt):x}"
            with attempt.spill.open("ab") as file:
                for turn in attempt.turns:
                    if isinstance(turn.routes, bytes):
                        offset = file.tell()
                        file.write(turn.routes)
                        self.memory_bytes -= len(turn.routes)
                        self.spilled_bytes += len(turn.routes)
                        turn.routes = (offset, len(turn.routes))

    @staticmethod
    def _bytes(attempt: Attempt, turn: HeldTurn) -> bytes:
        if isinstance(turn.routes, bytes):
            return turn.routes
        offset, length = turn.routes
        with attempt.spill.open("rb") as file:
            file.seek(offset)
            return file.read(length)


def running_digests(messages: Sequence[bytes]) -> list[int]:
    """Digest after each message, of it and all before it."""
    digests = []
    digest = xxhash.xxh3_64()
    for message in messages:
        digest.update(message)
        digest.update(b"\0")
        digests.append(digest.intdigest())
    return digests
