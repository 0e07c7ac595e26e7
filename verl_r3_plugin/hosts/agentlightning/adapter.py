"""Agent Lightning's adapter from completed rollouts to a DataProto, with the routes of each row as the compact field.

The host's adapter runs unchanged, on triplets without its own route field. Then each row of its batch is given the envelope of exactly its
tokens: rows are matched by token ids, not by counting, so a row that the host dropped, cut or did not merge cannot shift the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
from agentlightning.verl.rollout_adapter import RolloutAdapter
from verl import DataProto

from ... import metrics
from ...field import EMPTY, FIELD, column, pack
from ...schema import RouteSchema
from ...trajectory import Trajectory, TrajectoryBuilder
from .manager import RESPONSE_KEY, TurnRoutes


@dataclass(frozen=True)
class _Segment:
    """A trajectory and how many of its tokens are its first prompt."""

    trajectory: Trajectory
    prompt_tokens: int


class R3RolloutAdapter(RolloutAdapter):
    """RolloutAdapter whose batch carries `r3_routes`. Give it its schema with `use_routes`."""

    schema: RouteSchema | None = None
    policy: str = "first"
    encoding: str = "set"

    def use_routes(self, schema: RouteSchema, policy: str = "first", encoding: str = "set") -> None:
        """policy: which capture of a row wins (custom.r3.policy); encoding: custom.r3.codec."""
        self.schema, self.policy, self.encoding = schema, policy, encoding
        self.require_routed_experts = False  # the host would lose the step over one rollout without routes

    def get_train_data_batch(
        self, completed_rollouts: list[CompletedRollout], *args: Any, **kwargs: Any
    ) -> tuple[DataProto, dict[str, Any]]:
        batch, data_metrics = super().get_train_data_batch(completed_rollouts, *args, **kwargs)
        if self.schema is None:
            return batch, data_metrics
        segments: dict[str, list[_Segment]] = {}
        for rollout in completed_rollouts:
            segments[rollout.rollout_id] = list(self._segments(rollout.triplets or []))
        blobs, kept = [], []
        for row, rollout_id in enumerate(batch.non_tensor_batch["rollout_id_list"]):
            blob, trajectory = self._row(batch, row, segments[rollout_id])
            blobs.append(blob)
            if trajectory is not None:
                kept.append(trajectory)
        batch.non_tensor_batch[FIELD] = column(blobs)
        data_metrics |= metrics.coverage(kept)
        tokens = int(batch.batch["attention_mask"].sum())
        data_metrics |= metrics.size(self.schema, tokens, sum(map(len, blobs)), batch.batch["attention_mask"].numel())
        return batch, data_metrics

    def _segments(self, triplets: list[Triplet]) -> Iterator[_Segment]:
        """The trajectories that the host's aggregator makes of a rollout's turns, in its order."""
        builder, previous, first_prompts = TrajectoryBuilder(self.schema, self.policy), None, []
        for triplet in triplets:
            routes: TurnRoutes | None = triplet.response.get(RESPONSE_KEY)
            prompt, response = triplet.prompt["token_ids"], triplet.response["token_ids"]
            version = -1 if routes is None else routes.version
            if self.trace_aggregator_level == "transition":
                alone = TrajectoryBuilder(self.schema, self.policy)
                alone.add_turn(prompt, response, routes and routes.whole(self.schema), version=version)
                yield _Segment(alone.trajectories()[0], len(prompt))
                continue
            if routes is not None and routes.continues(previous):
                rows, start = routes.own(self.schema)
            else:
                rows, start = (None, 0) if routes is None else (routes.whole(self.schema), 0)
            segments = builder.segments
            builder.add_turn(prompt, response, rows, start=start, version=version)
            if builder.segments > segments:
                first_prompts.append(len(prompt))
            previous = routes
        for trajectory, prompt_tokens in zip(builder.trajectories(), first_prompts, strict=True):
            yield _Segment(trajectory, prompt_tokens)

    def _row(self, batch: DataProto, row: int, segments: list[_Segment]) -> tuple[bytes, Trajectory | None]:
        """Envelope and trajectory of one row; EMPTY where no segment has its tokens (a cut prompt, which the host drops)."""
        tensors = batch.batch
        mask = tensors["attention_mask"][row].bool().numpy()
        tokens = tensors["input_ids"][row].numpy()[mask]
        prompt_tokens = int(mask[: tensors["prompts"].shape[1]].sum())
        for segment in segments:
            whole = segment.trajectory.token_ids
            if prompt_tokens == segment.prompt_tokens and len(tokens) <= len(whole) and np.array_equal(whole[: len(tokens)], tokens):
                trajectory = segment.trajectory
                if len(tokens) < len(whole):
                    trajectory = trajectory.select(slice(0, len(tokens)))
                return pack(trajectory, encoding=self.encoding, last_trained=self._last_trained(tensors, row, prompt_tokens)), trajectory
        return EMPTY, None

    @staticmethod
    def _last_trained(tensors: Any, row: int, prompt_tokens: int) -> int | None:
        """Index, among the row's tokens, of the last one in the loss."""
        if "response_mask" not in tensors:
            return None
        trained = tensors["response_mask"][row].nonzero()
        return prompt_tokens + int(trained[-1]) if len(trained) else None
