"""What the trainer's metrics say about replay, all under `r3/`.

Every function takes numpy arrays of trained tokens and returns a plain dict; a figure that has no tokens to speak of is left out, so that
no tracker ever averages a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .schema import RouteSchema
from .trajectory import Trajectory

PREFIX = "r3/"
EXTREME_RATIO = 2.0


def coverage(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`r3/coverage`: present rows over all rows but each trajectory's last, over the whole batch."""
    rows = sum(max(0, len(t) - 1) for t in trajectories)
    present = sum(int(t.routes.present[:-1].sum()) for t in trajectories if len(t))
    return {PREFIX + "coverage": present / rows} if rows else {}


def fallback(trained: np.ndarray, replayed: np.ndarray) -> dict[str, float]:
    """`r3/fallback`: share of trained tokens whose predicting row, that of the token before, was routed live.

    trained: bool [tokens] of one or more sequences laid end to end; replayed: bool [tokens], the token's row was replayed. The first
    token of a sequence is never trained, so no predicting row is taken from the sequence before.
    """
    predicting = np.asarray(replayed, np.bool_)[:-1][np.asarray(trained, np.bool_)[1:]]
    return {PREFIX + "fallback": float(1.0 - predicting.mean())} if predicting.size else {}


def agreement(equal_experts: float, experts: float, equal_rows: float | None = None, rows: float | None = None) -> dict[str, float]:
    """`r3/agreement`: share of replayed experts that the actor's live router picks too; `r3/agreement_rows`: of rows equal as sets."""
    found = {PREFIX + "agreement": equal_experts / experts} if experts else {}
    if rows:
        found[PREFIX + "agreement_rows"] = equal_rows / rows
    return found


def mismatch(rollout_log_probs: np.ndarray, trainer_log_probs: np.ndarray, suffix: str = "") -> dict[str, float]:
    """How far the trainer's log-probs of sampled tokens are from the rollout engine's (natural logarithm, [trained tokens]).

    `r3/logprob_abs_diff`: mean of |trainer - rollout|. `r3/k3_kl`: the k3 estimate of KL(rollout || trainer) on tokens that the rollout
    engine sampled, mean of exp(d) - 1 - d with d = trainer - rollout (Schulman, "Approximating KL divergence", 2020).
    `r3/extreme_fraction`: share of tokens whose probability differs by more than a factor of 2, either way (arXiv 2510.11370).
    """
    rollout = np.asarray(rollout_log_probs, np.float64).reshape(-1)
    difference = np.asarray(trainer_log_probs, np.float64).reshape(-1) - rollout
    if not difference.size:
        return {}
    return {
        PREFIX + "logprob_abs_diff" + suffix: float(np.abs(difference).mean()),
        PREFIX + "k3_kl" + suffix: float((np.expm1(difference) - difference).mean()),
        PREFIX + "extreme_fraction" + suffix: float((np.abs(difference) > np.log(EXTREME_RATIO)).mean()),
    }


def size(schema: RouteSchema, tokens: int, held_bytes: int, padded_tokens: int | None = None) -> dict[str, float]:
    """`r3/bytes_per_token`, and `r3/host_bytes_per_token` of the hosts' own format for the same routes.

    The hosts' format is one narrow integer an expert and decoder layer, dense layers included, for every token of the padded batch;
    padded_tokens: rows x padded length (default: no padding).
    """
    if not tokens:
        return {}
    host = schema.num_layers * schema.top_k * schema.id_dtype.itemsize * (padded_tokens or tokens)
    return {PREFIX + "bytes_per_token": held_bytes / tokens, PREFIX + "host_bytes_per_token": host / tokens}
