"""The object that one Megatron router asks for its top-k, in place of choosing itself.

Megatron-core (0.16 and later) calls `get_replay_topk` of whatever a `TopKRouter` holds in `router_replay`, and goes on with the indices it
gets: probabilities, gradients, losses and dispatch are Megatron's own. That one method is the whole seam.

On a device nothing here waits: whether every row is valid is known on the host when routes are loaded, sums stay on the device until
they are asked for, and ids are widened only for the gather. A step in which all rows are valid does a gather instead of a top-k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ReplayError

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def narrow_dtype(num_experts: int) -> torch.dtype:
    """The narrowest torch dtype for expert ids; uint16 is left out because few operators take it."""
    return torch.uint8 if num_experts <= 256 else torch.int16 if num_experts <= 32_768 else torch.int32


class LayerReplay:
    """Routes of one MoE layer for the micro-batch that is about to run.

    name: the layer, for messages. freezes: asked in a forward pass whether it will be run again in backward (activation recompute); the
    routes it used, live ones included, are then kept and used again, so that forward and recompute cannot differ.
    """

    def __init__(self, name: str, num_experts: int, top_k: int, freezes: Callable[[], bool] = lambda: False) -> None:
        self.name = name
        self.num_experts = num_experts
        self.top_k = top_k
        self.layer_number: int | None = None  # Megatron 0.19 sets it
        self._freezes = freezes
        self._ids: torch.Tensor | None = None  # [tokens, top_k], narrow
        self._valid: torch.Tensor | None = None  # [tokens, 1] bool, None where all are
        self._frozen: deque[torch.Tensor] = deque()  # narrow [tokens, top_k], one a forward pass that waits for its recompute
        self._counts: torch.Tensor | None = None  # float64 [4]: agreed, compared, equal rows, rows

    def load(self, ids: torch.Tensor, valid: torch.Tensor | None) -> None:
        """ids: [tokens, top_k], narrow. valid: [tokens, 1] bool, or None where every row is valid."""
        self._ids, self._valid = ids, valid

    def clear(self) -> None:
        """Forget routes and frozen routes: the router chooses for itself again."""
        self._ids = self._valid = None
        self._frozen.clear()

    def count(self, on: bool) -> None:
        """Compare each replayed row with the live choice, at the price of the live top-k, until told otherwise."""
        self._counts = self._counts if on and self._counts is not None else torch.zeros(4, dtype=torch.float64) if on else None

    def take_counts(self) -> torch.Tensor | None:
        """Sums (agreed experts, compared experts, equal rows, rows) since counting began; counting starts again at zero."""
        counts, self._counts = self._counts, None if self._counts is None else torch.zeros_like(self._counts)
        return counts

    @property
    def frozen_passes(self) -> int:
        """Forward passes that wait for their recompute."""
        return len(self._frozen)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's seam. scores: [tokens, experts]; returns (scores of the chosen, their int64 ids), each [tokens, top_k]."""
        if _in_backward() and self._frozen:
            chosen = self._frozen.popleft().long()
            self._check(chosen, scores, topk)
            return scores.gather(1, chosen), chosen
        if self._ids is None:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if _in_backward():
            raise ReplayError(
                f"{self.name}: expected the routes of this micro-batch's forward pass for its recompute, found none kept; this kind "
                "of activation recompute cannot be replayed "
                "(actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity)"
            )
        self._check(self._ids, scores, topk)
        chosen = self._ids.long()
        if self._valid is not None or self._counts is not None:
            with torch.no_grad():
                _, live = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            if self._counts is not None:
                self._compare(chosen, live)
            if self._valid is not None:
                chosen = torch.where(self._valid, chosen, live)
        if self._freezes():
            self._frozen.append(chosen.to(narrow_dtype(self.num_experts)))
        return scores.gather(1, chosen), chosen

    def _check(self, ids: torch.Tensor, scores: torch.Tensor, topk: int) -> None:
        if ids.shape != (scores.shape[0], topk) or scores.shape[1] != self.num_experts:
            raise ReplayError(
                f"{self.name}: expected routes of {scores.shape[0]} tokens, top-{topk} of {scores.shape[1]} experts, found "
                f"{ids.shape[0]} tokens, top-{ids.shape[1]} of {self.num_experts}; the rows given to this rank are not its own"
            )

    def _compare(self, chosen: torch.Tensor, live: torch.Tensor) -> None:
        shared = (chosen.unsqueeze(2) == live.unsqueeze(1)).any(2).sum(1)  # [tokens]
        valid = torch.ones_like(shared, dtype=torch.bool) if self._valid is None else self._valid.squeeze(1)
        rows = valid.sum()
        equal = ((shared == chosen.shape[1]) & valid).sum()
        sums = torch.stack([(shared * valid).sum(), rows * chosen.shape[1], equal, rows]).to(torch.float64)
        self._counts = sums + self._counts.to(sums.device)


def _in_backward() -> bool:
    """A forward pass is being run again inside autograd's backward, whichever checkpoint implementation does it.

    torch's own checkpointing asks the same private function. Megatron's `is_checkpointing()` is no substitute: a nested checkpoint clears
    it before the router runs.
    """
    return torch._C._current_graph_task_id() != -1


def router_freezes(router: Any) -> bool:
    """A training forward pass without gradients is one that activation recompute will run again."""
    return router.training and not torch.is_grad_enabled() and router.config.recompute_granularity is not None
