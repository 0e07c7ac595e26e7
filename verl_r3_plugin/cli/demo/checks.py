"""What makes the demo a proof: routes equal for every trained token, and a server that really has the new weights."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import numpy as np

from ...capture import VllmCapture
from ...errors import R3Error
from ...field import pack
from ...routes import RoutedExperts
from ...schema import RouteSchema
from ...trajectory import Trajectory
from .checkpoint import HF_CONFIG
from .trainer import Batch, Trainer

PROBE_ROWS, PROBE_TOKENS = 4, 48
PUSH_TOLERANCE = 0.05
"""Mean |log-prob difference| on the probe above which the pushed weights are not the trainer's. With the same weights and routes the two
engines' kernels differ by about 0.01 here; one expert matrix left over from the step before differs by more than this."""


class PushFailed(R3Error):
    """The server's log-probs after a push are not those of the trainer's new model."""


def routes_equal(
    records: Sequence[tuple[np.ndarray, dict[int, np.ndarray]]],
    tapped: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    schema: RouteSchema,
) -> tuple[bool, int, int]:
    """(all equal, rows compared, rows that differ): Megatron's emitted routing maps against the tap's full captures.

    records: as `Trainer.record` gives them. tapped: [tokens - 1, decoder layers, top_k] of each row of the batch; trained: bool [tokens].
    Compared is every row that comes before a trained token: all of them take part in that token's log-prob.
    """
    lengths = [len(mask) for mask in trained]
    total = sum(lengths)
    expected = np.zeros((total, schema.num_layers, schema.num_experts), np.bool_)
    wanted = np.zeros(total, np.bool_)
    start = 0
    for rows, mask in zip(tapped, trained, strict=True):
        np.put_along_axis(expected[start : start + len(rows)], rows.astype(np.int64), True, axis=2)
        wanted[start : start + (int(mask.nonzero()[0][-1]) if mask.any() else 0)] = True
        start += len(mask)
    seen = np.zeros(total, np.bool_)
    different = np.zeros(total, np.bool_)
    for numbers, maps in records:
        real = numbers >= 0
        seen[numbers[real]] = True
        if sorted(maps) != list(schema.moe_layers):
            return False, 0, total
        for layer, emitted in maps.items():
            different[numbers[real]] |= (emitted[real] != expected[numbers[real], layer]).any(axis=1)
    compared = int((wanted & seen).sum())
    return bool(compared and (seen | ~wanted).all() and not different[wanted].any()), compared, int(different[wanted].sum())


def probe_batch(seed: int, vocab_size: int) -> list[np.ndarray]:
    """Random token ids that both engines are asked about after each push."""
    return list(np.random.default_rng(seed).integers(2, vocab_size, (PROBE_ROWS, PROBE_TOKENS)))


def served_log_probs(port: int, model: str, tokens: Sequence[np.ndarray], schema: RouteSchema) -> tuple[list[np.ndarray], list[bytes]]:
    """vLLM's log-prob of each prompt token, and the routes under which it computed them."""
    log_probs, blobs = [], []
    with httpx.Client(timeout=120) as client:
        for ids in tokens:
            body = {"model": model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            answer = client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            of_prompt = choice["prompt_logprobs"][1:]
            found = [entry[str(token)]["logprob"] for entry, token in zip(of_prompt, ids[1:].tolist(), strict=True)]
            log_probs.append(np.array([0.0, *found]))
            rows = VllmCapture().routes(schema, choice["routed_experts"])[: len(ids) - 1]
            routes = RoutedExperts.join([rows, RoutedExperts.absent(schema, 1)])
            none = np.full(len(ids), -1)
            blobs.append(pack(Trajectory(ids.astype(np.int64), routes, none.astype(np.int32), none)))
    return log_probs, blobs


def check_push(trainer: Trainer, port: int, model: str, seed: int) -> float:
    """Mean |log-prob difference| between server and trainer on the probe; PushFailed above PUSH_TOLERANCE."""
    tokens = probe_batch(seed, HF_CONFIG["vocab_size"])
    served, blobs = served_log_probs(port, model, tokens, trainer.schema)
    everything = [np.arange(len(ids)) > 0 for ids in tokens]
    batch = Batch(list(tokens), everything, served, blobs)
    ours = trainer.log_probs(batch, replay=True)
    difference = float(np.mean([np.abs(a[1:] - b[1:]).mean() for a, b in zip(ours, served, strict=True)]))
    if difference > PUSH_TOLERANCE:
        raise PushFailed(
            f"expected vLLM to compute with the new weights (mean |log-prob difference| on a probe at most {PUSH_TOLERANCE}), found "
            f"{difference:.4f}; the weight push left the server wrong"
        )
    return difference
