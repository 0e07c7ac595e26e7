"""One call of an engine as the plugin sees it: whose routes came along, how complete they are, and what the trainer is told about them.

Counts are kept as sums. VERL averages what its workers report, over micro-batches, ranks and mini-batches, and an average of shares
would weigh a short micro-batch like a long one; a share of two averaged sums does not. `finish` makes the shares, in the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ... import metrics
from ...errors import ReplayError
from ...field import unpack
from ...schema import RouteSchema

ROW_KEY = "r3_row"
SUM_PREFIX = "r3_sum/"


@dataclass
class Step:
    """The sequences of one call of the engine on this data-parallel rank.

    blobs: one envelope per sequence (b"" where there are no routes). token_ids: one array of the unpadded ids per sequence.
    trained: one bool array per sequence: whether the token is in the loss. present: whether the row of that token is held.
    reasons: one per sequence, why its routes are not used, or None.
    """

    schema: RouteSchema
    names: list[str]
    blobs: list[bytes]
    token_ids: list[np.ndarray]
    trained: list[np.ndarray]
    present: list[np.ndarray]
    reasons: list[str | None]

    def sums(self) -> dict[str, float]:
        """Token counts of this rank. A trained token is predicted by the row of the token before it."""
        predicts = [np.append(mask[1:], False) for mask in self.trained]
        fell_back = sum(int((wanted & ~present).sum()) for wanted, present in zip(predicts, self.present, strict=True))
        tokens = sum(len(ids) for ids in self.token_ids)
        held = sum(len(blob) for blob in self.blobs)
        sizes = metrics.size(self.schema, tokens, held)
        return {
            "rows": float(sum(max(len(ids) - 1, 0) for ids in self.token_ids)),
            "rows_present": float(sum(int(present[:-1].sum()) for present in self.present)),
            "trained": float(sum(int(wanted.sum()) for wanted in predicts)),
            "fell_back": float(fell_back),
            "tokens": float(tokens),
            "bytes": float(held),
            "host_bytes": sizes.get("r3/host_bytes_per_token", 0.0) * tokens,
        }

    def worst(self, count: int = 5) -> str:
        """The sequences that fall back most, with the reason where one is known, for an error message."""
        rows = []
        for name, mask, present, reason in zip(self.names, self.trained, self.present, self.reasons, strict=True):
            wanted = np.append(mask[1:], False)
            missing = int((wanted & ~present).sum())
            if missing:
                rows.append((missing, f"{name}: {missing} of {int(wanted.sum())} tokens ({reason or 'rows not captured'})"))
        rows.sort(reverse=True)
        more = f" and {len(rows) - count} more" if len(rows) > count else ""
        return "; ".join(text for _, text in rows[:count]) + more


def read_step(data: Any, blobs: Sequence[bytes], schema: RouteSchema) -> Step:
    """The Step of VERL's no-padding TensorDict `data`, whose field held `blobs` (one a sequence)."""
    input_ids = data["input_ids"]
    values, offsets = input_ids.values().cpu().numpy(), input_ids.offsets().cpu().numpy()
    token_ids = [values[start:stop] for start, stop in pairwise(offsets)]
    present, reasons = [], []
    for blob, ids in zip(blobs, token_ids, strict=True):
        routes, reason = unpack(blob, ids, schema=schema, layers=[0])
        present.append(routes.present)
        reasons.append(reason)
    return Step(schema, _names(data, len(token_ids)), list(blobs), token_ids, trained_tokens(data, token_ids), present, reasons)


def trained_tokens(data: Any, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One bool array per sequence: tokens of the response that are in the loss. Responses end their sequence."""
    mask = data["loss_mask"] if "loss_mask" in data else data["response_mask"]
    trained = []
    for row, ids in enumerate(token_ids):
        response = _response_row(data, mask, row).astype(np.bool_)[: len(ids)]
        full = np.zeros(len(ids), np.bool_)
        if len(response):
            full[len(ids) - len(response) :] = response
        trained.append(full)
    return trained


def log_prob_sums(data: Any, rows: int) -> dict[str, float]:
    """Sums of the mismatch between the rollout's log-probs and the actor's, over trained tokens; empty where the batch has not both."""
    keys = set(data.keys())
    if not {"rollout_log_probs", "old_log_probs"} <= keys:
        return {}
    mask = data["response_mask"]
    old, rollout = [], []
    for row in range(rows):
        wanted = _response_row(data, mask, row).astype(np.bool_)
        old.append(_response_row(data, data["old_log_probs"], row)[wanted])
        rollout.append(_response_row(data, data["rollout_log_probs"], row)[wanted])
    means = metrics.mismatch(np.concatenate(rollout), np.concatenate(old))
    count = float(sum(len(values) for values in old))
    sums = {name.removeprefix(metrics.PREFIX): mean * count for name, mean in means.items()}
    return {**sums, "log_probs": count} if sums else {}


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """`r3/*` from averaged sums; a share whose denominator is zero is left out."""

    def share(name: str, part: str, whole: str) -> dict[str, float]:
        return {f"r3/{name}": float(sums[part]) / float(sums[whole])} if sums.get(whole) and part in sums else {}

    return {
        **share("coverage", "rows_present", "rows"),
        **share("fallback", "fell_back", "trained"),
        **share("agreement", "agreed", "compared"),
        **share("logprob_abs_diff", "logprob_abs_diff", "log_probs"),
        **share("k3_kl", "k3_kl", "log_probs"),
        **share("extreme_fraction", "extreme_fraction", "log_probs"),
        **share("bytes_per_token", "bytes", "tokens"),
        **share("host_bytes_per_token", "host_bytes", "tokens"),
    }


def refuse_if_too_few(sums: Mapping[str, float], step: Step, max_fallback: float, first: bool) -> None:
    """Raise ReplayError above `max_fallback`; and when the very first step has no row at all, since then nothing is captured anywhere.

    sums: `fell_back`, `trained` and `rows_present` over all data-parallel ranks, so that all of them raise together.
    """
    share = sums["fell_back"] / sums["trained"] if sums["trained"] else 0.0
    if first and sums["trained"] and not sums["rows_present"]:
        raise ReplayError(
            "expected routes in the first step, found not one row: the rollout engine captured nothing, or captured zeros throughout a "
            f"MoE layer (some vLLM versions and kernels do this silently). On this rank: {step.worst()}. Check "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay and run verl-r3 doctor"
        )
    if share > max_fallback:
        raise ReplayError(
            f"expected at most {max_fallback:.1%} of the trained tokens to fall back to live routing, found {share:.1%}. "
            f"On this rank: {step.worst() or 'none, all are on other ranks'}. "
            "Raise actor_rollout_ref.rollout.custom.r3.max_fallback to train on them all the same"
        )


def _response_row(data: Any, tensor: torch.Tensor, row: int) -> np.ndarray:
    """[response tokens]: row `row` of a tensor over responses, which is jagged, or dense and padded on the right."""
    if tensor.is_nested:
        offsets = tensor.offsets()
        return tensor.values()[int(offsets[row]) : int(offsets[row + 1])].detach().cpu().numpy()
    values = tensor[row].detach().cpu().numpy()
    attention = data.get("attention_mask", None)
    if attention is None or attention.is_nested:
        return values
    return values[attention[row, -len(values) :].bool().cpu().numpy()]


def _names(data: Any, count: int) -> list[str]:
    """What a person can find a rollout by: the trainer's uid and the place in this rank's batch."""
    uids = data.get("uid", None)
    uids = uids.tolist() if hasattr(uids, "tolist") else uids
    if not isinstance(uids, list) or len(uids) != count:
        return [f"row {row}" for row in range(count)]
    return [f"rollout {uid} (row {row})" for row, uid in enumerate(uids)]
