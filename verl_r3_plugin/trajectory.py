"""Deltas of many turns -> one trajectory with one row a token.

Each turn of an agent sends its whole context again and samples a few tokens more; the rollout engine returns the rows from some start
on. This file decides which row a token keeps, and never moves a row to another token: rows are placed by absolute position, each join
compares token ids, and what does not fit is left absent.

Cost is linear in tokens: buffers grow by doubling and a turn touches only its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import codec
from .errors import ConfigError
from .routes import RoutedExperts
from .schema import RouteSchema

POLICIES = ("first", "last")
NONE = -1


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Tokens of one segment and their rows. The last token never has a row: no forward pass has run over it.

    token_ids: int64 [tokens]. routes: [tokens]. turn: int32 [tokens] and version: int64 [tokens], of the turn that a row came from and
    the model version it ran under, -1 where the row is absent (or the version was not told).
    """

    token_ids: np.ndarray
    routes: RoutedExperts
    turn: np.ndarray
    version: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def coverage(self) -> float:
        """Present rows over all rows but the last token's; 1.0 where there is none to capture."""
        rows = self.routes.present[:-1]
        return float(rows.mean()) if len(rows) else 1.0

    def select(self, tokens: np.ndarray | slice) -> Trajectory:
        """The trajectory of a subset of its tokens, in order, as a host makes by truncation; each kept row stays with its token."""
        routes = RoutedExperts(self.routes.schema, self.routes.ids[tokens], self.routes.present[tokens])
        if len(routes):
            routes = routes.drop(np.array([len(routes) - 1]))
        return Trajectory(self.token_ids[tokens], routes, self.turn[tokens], self.version[tokens])

    def encode(self, encoding: str = "set", last_trained: int | None = None) -> bytes:
        """One envelope. last_trained: index of the last trained token; its own row and the rows after it are left out, since a
        token's gradient depends on the rows before it alone."""
        rows = max(0, len(self) - 1 if last_trained is None else min(last_trained, len(self) - 1))
        return codec.encode(self.routes[:rows], token_count=len(self), token_hash=codec.token_hash(self.token_ids), encoding=encoding)


@dataclass(frozen=True)
class Join:
    """What became of a turn. extends: it continued its segment; added: rows that it contributed; refused: why rows were not used."""

    extends: bool
    added: int
    refused: str | None = None


class TrajectoryBuilder:
    """Collects the turns of one conversation.

    policy `first`: the row under which a token was sampled stays, whatever a later prefill says (weights may have changed, the cache
    may have been dropped). `last`: the newest capture of a row wins.
    """

    def __init__(self, schema: RouteSchema, policy: str = "first") -> None:
        if policy not in POLICIES:
            raise ConfigError(f"custom.r3.policy: expected one of {list(POLICIES)}, found {policy!r}")
        self.schema = schema
        self.policy = policy
        self.turns = 0
        self._done: list[Trajectory] = []
        self._segment = _Segment(schema)

    def add_turn(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        response_ids: Sequence[int] | np.ndarray,
        routes: RoutedExperts | None,
        *,
        start: int = 0,
        version: int = NONE,
    ) -> Join:
        """One answer of the rollout engine: context, sampled tokens, and the rows of tokens start, start + 1, ... of both together.

        A turn that does not begin with all tokens of the segment so far starts a new segment, as Agent Lightning's trajectory
        aggregator does. A turn without sampled tokens adds no token (hosts drop it), only rows of tokens that are there.
        """
        prompt = np.asarray(prompt_ids, np.int64).reshape(-1)
        response = np.asarray(response_ids, np.int64).reshape(-1)
        turn, self.turns = self.turns, self.turns + 1
        extends = self._segment.is_prefix_of(prompt)
        if len(response):
            if not extends:
                self._finish()
            self._segment.extend(prompt, response, version)
        elif not extends:
            return Join(False, 0, "no token was sampled and the context is another one")
        total = len(prompt) + len(response)
        refused = self._reason_to_refuse(routes, start, total)
        if routes is None or refused:
            return Join(extends, 0, refused)
        return Join(extends, self._segment.place(routes, start, turn, version, keep=self.policy == "first"))

    def next_start(self, version: int = NONE) -> int:
        """Index of the first row worth asking for when the conversation goes on under `version`.

        That is the last sampled token's, unless an earlier row is missing that the same model version could still give.
        """
        return self._segment.next_start(version)

    def gaps(self) -> np.ndarray:
        """Indices of the segment's absent rows, its last token's left out."""
        segment = self._segment
        return (~segment.present[: max(0, segment.length - 1)]).nonzero()[0]

    @property
    def segments(self) -> int:
        """How many segments there are so far."""
        return len(self._done) + bool(self._segment.length)

    def trajectories(self) -> list[Trajectory]:
        """One for each segment, in the order in which they began."""
        return [*self._done, self._segment.trajectory()] if self._segment.length else list(self._done)

    def _finish(self) -> None:
        if self._segment.length:
            self._done.append(self._segment.trajectory())
            self._segment = _Segment(self.schema)

    def _reason_to_refuse(self, routes: RoutedExperts | None, start: int, total: int) -> str | None:
        if routes is None:
            return "no routes were returned"
        if routes.schema != self.schema:
            return f"expected routes of {self.schema}, found {routes.schema}"
        if start < 0 or start + len(routes) > max(0, total - 1):
            return f"expected rows within the first {total - 1} of {total} tokens, found rows {start} to {start + len(routes)}"
        return None


class _Segment:
    """Growing buffers of one segment; the first `length` entries are in use."""

    def __init__(self, schema: RouteSchema) -> None:
        self.schema = schema
        self.length = 0
        self.tokens = np.empty(0, np.int64)
        self.token_version = np.empty(0, np.int64)  # model version under which the token was first seen
        self.ids = np.empty((0, schema.num_moe_layers, schema.top_k), schema.id_dtype)
        self.present = np.empty(0, np.bool_)
        self.turn = np.empty(0, np.int32)
        self.version = np.empty(0, np.int64)
        self._before_turn = 0  # length when the turn now being placed began

    def is_prefix_of(self, prompt: np.ndarray) -> bool:
        return len(prompt) >= self.length and np.array_equal(prompt[: self.length], self.tokens[: self.length])

    def extend(self, prompt: np.ndarray, response: np.ndarray, version: int) -> None:
        self._before_turn = self.length
        total = len(prompt) + len(response)
        self._reserve(total)
        self.tokens[self.length : len(prompt)] = prompt[self.length :]
        self.tokens[len(prompt) : total] = response
        self.token_version[self.length : total] = version
        self.present[self.length : total] = False
        self.turn[self.length : total] = NONE
        self.version[self.length : total] = NONE
        self.length = total

    def place(self, routes: RoutedExperts, start: int, turn: int, version: int, *, keep: bool) -> int:
        stop = min(start + len(routes), self.length - 1)
        if stop <= start:
            return 0
        take = routes.present[: stop - start].copy()
        if keep:
            rows = np.arange(start, stop)
            # A row missed by an earlier turn may be made good only by the model that the earlier turn ran under. The row of the
            # last token before this turn could not have been there: its first forward pass is this turn's.
            stale = (rows < self._before_turn - 1) & (self.token_version[start:stop] != version)
            take &= ~self.present[start:stop] & ~stale
        at = take.nonzero()[0]
        self.ids[start + at] = routes.ids[at]
        self.present[start + at] = True
        self.turn[start + at] = turn
        self.version[start + at] = version
        return len(at)

    def next_start(self, version: int) -> int:
        known = max(0, self.length - 1)
        wanted = ~self.present[:known] & (self.token_version[:known] == version)
        return int(wanted.argmax()) if wanted.any() else known

    def trajectory(self) -> Trajectory:
        used = slice(0, self.length)
        ids = np.where(self.present[used, None, None], self.ids[used], 0)
        routes = RoutedExperts(self.schema, ids, self.present[used].copy())
        return Trajectory(self.tokens[used].copy(), routes, self.turn[used].copy(), self.version[used].copy())

    def _reserve(self, total: int) -> None:
        if total <= len(self.tokens):
            return
        capacity = max(total, 2 * len(self.tokens))
        for name in ("tokens", "token_version", "ids", "present", "turn", "version"):
            old = getattr(self, name)
            new = np.empty((capacity, *old.shape[1:]), old.dtype)
            new[: self.length] = old[: self.length]
            setattr(self, name, new)
