"""The demo's trainer: Megatron-core's GPTModel, VERL's advantage and policy loss, and the plugin's replay, on one CPU.

Weights are kept in float32 and rounded to bfloat16 for every forward pass, as mixed precision does, so that the server and the trainer
compute with the same numbers; what differs between them are the kernels, and with live routing the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import plugins
from ...field import FIELD
from ...replay.local import LocalRoutes
from ...schema import RouteSchema
from . import megatron_cpu
from .checkpoint import HF_CONFIG
from .convert import load_into, weights_of

MICRO_BATCH = 8  # rows


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a DataProto without padding on the left, as the trainer runs them.

    tokens: each row's ids. trained: bool, each row's tokens in the loss. rollout_log_probs: float32, 0 where not trained.
    blobs: each row's routes.
    """

    tokens: list[np.ndarray]
    trained: list[np.ndarray]
    rollout_log_probs: list[np.ndarray]
    blobs: list[bytes]

    @classmethod
    def of(cls, data: Any) -> Batch:
        """From VERL's batch: prompts padded on the left, responses on the right."""
        tokens, trained, log_probs = [], [], []
        prompt_width = data.batch["prompts"].shape[1]
        for row in range(len(data)):
            mask = data.batch["attention_mask"][row].bool().numpy()
            prompt = int(mask[:prompt_width].sum())
            response = int(mask[prompt_width:].sum())
            tokens.append(data.batch["input_ids"][row].numpy()[mask])
            in_loss = data.batch["response_mask"][row, :response].bool().numpy()
            trained.append(np.concatenate([np.zeros(prompt, np.bool_), in_loss]))
            of_response = data.batch["rollout_log_probs"][row, :response].numpy() * in_loss
            log_probs.append(np.concatenate([np.zeros(prompt, np.float32), of_response]))
        return cls(tokens, trained, log_probs, list(data.non_tensor_batch[FIELD]))

    def micro_batches(self, size: int = MICRO_BATCH) -> Iterator[slice]:
        """Slices of consecutive rows."""
        for start in range(0, len(self.tokens), size):
            yield slice(start, start + size)


class Trainer:
    """The model, its optimiser, and replay attached to its routers."""

    def __init__(self, weights: dict[str, torch.Tensor], schema: RouteSchema, learning_rate: float, replay_mode: str = "megatron") -> None:
        megatron_cpu.initialise()
        config = megatron_cpu.qwen3_moe_config(HF_CONFIG)
        self.schema = schema
        self.model = megatron_cpu.build_gpt(
            config,
            vocab_size=HF_CONFIG["vocab_size"],
            max_sequence_length=HF_CONFIG["max_position_embeddings"],
            rotary_base=HF_CONFIG["rope_theta"],
        )
        load_into(self.model, weights, HF_CONFIG)
        mode = plugins.replay_mode(replay_mode)
        self.replay = mode.attach([self.model], schema)
        self._master = [parameter.detach().clone().requires_grad_() for parameter in self.model.parameters()]
        self._placed: list[np.ndarray] | None = None  # row numbers of each micro-batch, while `record` wants them
        self._optimiser = torch.optim.AdamW(self._master, lr=learning_rate, weight_decay=0.0)

    def log_probs(self, batch: Batch, *, replay: bool, statistics: bool = False, blobs: Sequence[bytes] | None = None) -> list[np.ndarray]:
        """float64 [tokens] a row: log-prob of each token given those before it; 0 for the first. blobs: other routes than the batch's."""
        found: list[np.ndarray] = []
        self.model.eval()
        with torch.no_grad(), self.replay.step(statistics=statistics):
            for rows in batch.micro_batches():
                values, lengths = self._forward(batch, rows, batch.blobs if blobs is None else blobs, replay)
                found += [row[:length].double().numpy() for row, length in zip(values, lengths, strict=True)]
        return found

    def update(
        self, batch: Batch, advantages: list[np.ndarray], old_log_probs: list[np.ndarray], loss_config: Any, *, replay: bool
    ) -> float:
        """One optimiser step over the batch; the gradient's norm."""
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        self.model.train()
        self.model.zero_grad(set_to_none=True)
        total = sum(int(trained.sum()) for trained in batch.trained)
        policy_loss = get_policy_loss_fn("vanilla")
        with self.replay.step():
            for rows in batch.micro_batches():
                values, _ = self._forward(batch, rows, batch.blobs, replay)
                mask = _pad(batch.trained[rows]).bool()
                loss, _ = policy_loss(
                    old_log_prob=_pad(old_log_probs[rows]).float(),
                    log_prob=values,
                    advantages=_pad(advantages[rows]).float(),
                    response_mask=mask,
                    loss_agg_mode="token-mean",
                    config=loss_config,
                )
                (loss * (mask.sum() / total)).backward()
        for master, parameter in zip(self._master, self.model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(self._master, 1.0)
        self._optimiser.step()
        with torch.no_grad():
            for master, parameter in zip(self._master, self.model.parameters(), strict=True):
                parameter.copy_(master.bfloat16())
        return float(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """The checkpoint to serve."""
        return weights_of(self.model, HF_CONFIG)

    @contextmanager
    def record(self) -> Iterator[list[tuple[np.ndarray, dict[int, np.ndarray]]]]:
        """What the routers emit meanwhile: (row numbers, {layer: bool [local tokens, experts]}) of each micro-batch."""
        records: list[tuple[np.ndarray, dict[int, np.ndarray]]] = []
        self._placed = []
        try:
            with megatron_cpu.record_routing_maps([self.model]) as maps:
                yield records
            for number, placed in enumerate(self._placed):
                records.append((placed, {layer: seen[number].numpy() for layer, seen in maps.items()}))
        finally:
            self._placed = None

    def _forward(self, batch: Batch, rows: slice, blobs: Sequence[bytes], replay: bool) -> tuple[torch.Tensor, list[int]]:
        """Log-probs [rows, longest] of each token given those before it, and the rows' lengths."""
        tokens = batch.tokens[rows]
        lengths = [len(ids) for ids in tokens]
        ids = _pad(tokens).long()
        count, longest = ids.shape
        placed = token_numbers(lengths, longest)
        if replay:
            self.replay.load(self.model, LocalRoutes.gather(blobs[rows], tokens, placed, self.replay.layers(self.model), self.schema))
        else:
            self.replay.clear()
        if self._placed is not None:
            first = sum(len(ids) for ids in batch.tokens[: rows.start])
            self._placed.append(np.where(placed < 0, -1, placed + first))
        positions = torch.arange(longest).expand(count, longest).contiguous()
        causal = torch.triu(torch.ones(longest, longest, dtype=torch.bool), 1)[None, None]
        logits = self.model(ids, positions, causal).float()
        predicted = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return torch.nn.functional.pad(predicted, (1, 0)), lengths


def token_numbers(lengths: Sequence[int], longest: int) -> np.ndarray:
    """int64 [longest * rows]: the number, among all tokens laid end to end, of each token as Megatron's routers see a padded batch
    (sequence first: token 0 of every row, then token 1), -1 for padding."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    position = np.arange(longest)[:, None]
    return np.where(position < np.asarray(lengths), starts + position, -1).reshape(-1).astype(np.int64)


def _pad(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """[rows, longest], zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(np.ascontiguousarray(a)) for a in arrays], batch_first=True)
