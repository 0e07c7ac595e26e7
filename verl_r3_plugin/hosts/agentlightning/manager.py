"""Agent Lightning's rollout managers, with each turn's routes fetched from the gateway as bytes.

A route rides in `Triplet.response`, which is free-form. The host's own field there stays None, so nothing of the host's R3 runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentlightning.schemas import DEFAULT_ATTEMPT_ID, Rollout
from agentlightning.verl.agl_rollout_manager import (
    AglAsyncRolloutManager,
    AglRolloutManager,
    AglRolloutManagerBase,
    CompletedRollout,
    EnqueuedRollout,
)

from ... import codec
from ...errors import CodecError, HostError
from ...routes import RoutedExperts
from ...schema import RouteSchema
from .wire import CHECKSUM_HEADER, NO_PARENT, Turn, unpack

RESPONSE_KEY = "r3"


@dataclass(frozen=True)
class TurnRoutes:
    """Rows of one triplet: `turns[index]`, and its parents' for the rows before its own."""

    turns: Sequence[Turn]
    index: int

    @property
    def version(self) -> int:
        return self.turns[self.index].version

    def continues(self, other: TurnRoutes | None) -> bool:
        """This turn's tokens begin with all of `other`'s, and the gateway knew it."""
        if other is None or other.turns is not self.turns:
            return False
        turn = self.turns[self.index]
        return turn.parent == other.index and turn.extent == self.turns[other.index].tokens - 1

    def own(self, schema: RouteSchema) -> tuple[RoutedExperts | None, int]:
        """(rows that this turn added, index of the first)."""
        turn = self.turns[self.index]
        return (codec.decode(turn.routes, schema=schema) if turn.routes else None), turn.start

    def whole(self, schema: RouteSchema) -> RoutedExperts:
        """All rows of this turn's tokens but the last: each from the earliest turn that holds it."""
        path, limit = [], self.turns[self.index].tokens - 1
        joined, index = RoutedExperts.absent(schema, limit), self.index
        while index != NO_PARENT:
            turn = self.turns[index]
            path.append((turn, limit))
            index, limit = turn.parent, min(limit, turn.extent)
        for turn, limit in reversed(path):
            if turn.routes:
                rows = codec.decode(turn.routes, schema=schema)[: max(0, limit - turn.start)]
                at = slice(turn.start, turn.start + len(rows))
                new = rows.present & ~joined.present[at]
                joined.ids[at][new] = rows.ids[new]
                joined.present[at] |= new
        return joined


class R3ManagerMixin(AglRolloutManagerBase):
    """Tells the gateway the schema, and adds routes to every completed training rollout."""

    def use_routes(self, schema: RouteSchema) -> None:
        """Call once after construction; HostError unless the server at agl_base_url captures routes."""
        answer = self.client.put("/r3/schema", json=asdict(schema))
        if answer.status_code == 404:
            raise HostError(
                f"expected a gateway that captures routes at {self.client.base_url}, found one without /r3; start `verl-r3 gateway` in "
                "place of agl-server (same arguments)"
            )
        answer.raise_for_status()

    def gateway_status(self) -> dict[str, Any]:
        """What the gateway says of its captures (`GET /r3/status`)."""
        answer = self.client.get("/r3/status")
        answer.raise_for_status()
        return answer.json()

    def _build_completed_rollout(self, enqueued_rollout: EnqueuedRollout, rollout: Rollout) -> CompletedRollout:
        completed = super()._build_completed_rollout(enqueued_rollout, rollout)
        if rollout.is_train and completed.triplets:
            attempt = rollout.status.last_attempt_id or DEFAULT_ATTEMPT_ID
            turns = self._fetch_routes(rollout.rollout_id, attempt)
            by_tokens = {(turn.tokens, turn.token_hash): index for index, turn in enumerate(turns)}
            for triplet in completed.triplets:
                tokens = [*triplet.prompt["token_ids"], *triplet.response["token_ids"]]
                index = by_tokens.get((len(tokens), codec.token_hash(tokens)))
                # An event that a pod posted may claim routes of its own; only what the gateway saw counts.
                triplet.response["routed_experts"] = None
                triplet.response[RESPONSE_KEY] = None if index is None else TurnRoutes(turns, index)
        return completed

    def _fetch_routes(self, rollout_id: str, attempt_id: str) -> list[Turn]:
        """The attempt's turns; none, with a line that says why, if the gateway cannot give them: that costs this rollout's routes only."""
        try:
            answer = self.client.get(f"/r3/rollouts/{rollout_id}/attempts/{attempt_id}")
            answer.raise_for_status()
            return unpack(answer.content, answer.headers.get(CHECKSUM_HEADER))
        except (CodecError, OSError, ValueError, RuntimeError) as error:
            print(f"R3: no routes for rollout {rollout_id}, its tokens are routed live: {error}")
            return []


class R3RolloutManager(R3ManagerMixin, AglRolloutManager):
    """Synchronous manager with routes."""


class R3AsyncRolloutManager(R3ManagerMixin, AglAsyncRolloutManager):
    """Asynchronous manager with routes."""
