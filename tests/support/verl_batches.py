"""Batches as VERL's trainer makes them: a padded DataProto with prompts on the left and responses on the right, and the field beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_r3_plugin.field import FIELD, column, pack
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema
from verl_r3_plugin.trajectory import TrajectoryBuilder

SCHEMA = RouteSchema(16, 4, 4, (0, 2, 3))  # of support.local_spec_engine.HF


@dataclass
class Sample:
    """token_ids: [prompt + response]. mask: [response] whether trained. routes: [tokens], the last row absent. blob: the field's value."""

    prompt: np.ndarray
    response: np.ndarray
    mask: np.ndarray
    routes: RoutedExperts
    blob: bytes | None

    @property
    def token_ids(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.response])


def random_ids(rng: np.random.Generator, schema: RouteSchema, tokens: int) -> np.ndarray:
    """[tokens, moe_layers, top_k] random sets of experts."""
    scores = rng.random((tokens, schema.num_moe_layers, schema.num_experts))
    return scores.argsort(-1)[..., : schema.top_k].astype(schema.id_dtype)


def sample(rng: np.random.Generator, prompt: int, response: int, *, schema: RouteSchema = SCHEMA, vocab: int = 128, missing=()) -> Sample:
    """missing: rows that were not captured; `missing=None`: no routes at all."""
    ids = rng.integers(1, vocab, prompt + response)
    routes = RoutedExperts(schema, random_ids(rng, schema, prompt + response - 1), np.ones(prompt + response - 1, np.bool_))
    builder = TrajectoryBuilder(schema)
    if missing is not None and len(missing):
        routes = routes.drop(np.asarray(missing))
    builder.add_turn(ids[:prompt], ids[prompt:], None if missing is None else routes)
    trajectory = builder.trajectories()[0]
    blob = None if missing is None else pack(trajectory)
    return Sample(ids[:prompt], ids[prompt:], np.ones(response, np.int64), trajectory.routes, blob)


def data_proto(samples: list[Sample], *, field: bool = True, seed: int = 0) -> Any:
    """The DataProto that VERL's v0 trainer holds after a rollout and after old log-probs and advantages were computed."""
    from verl import DataProto

    rng = np.random.default_rng(seed)
    longest_prompt, longest_response = max(len(s.prompt) for s in samples), max(len(s.response) for s in samples)

    def padded(values: list[np.ndarray], width: int, left: bool, dtype=np.int64) -> torch.Tensor:
        rows = [np.pad(v.astype(dtype), (width - len(v), 0) if left else (0, width - len(v))) for v in values]
        return torch.from_numpy(np.stack(rows))

    prompts = padded([s.prompt for s in samples], longest_prompt, True)
    responses = padded([s.response for s in samples], longest_response, False)
    attention = torch.cat(
        [
            padded([np.ones(len(s.prompt)) for s in samples], longest_prompt, True),
            padded([np.ones(len(s.response)) for s in samples], longest_response, False),
        ],
        1,
    )
    shape = (len(samples), longest_response)
    rollout = torch.from_numpy(-rng.random(shape).astype(np.float32))
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": padded([s.mask for s in samples], longest_response, False),
        "rollout_log_probs": rollout,
        "old_log_probs": rollout + torch.from_numpy((0.1 * rng.standard_normal(shape)).astype(np.float32)),
        "advantages": torch.from_numpy(rng.standard_normal(shape).astype(np.float32)),
    }
    others: dict[str, np.ndarray] = {"uid": np.array([f"u{i}" for i in range(len(samples))], object)}
    if field:
        others[FIELD] = column([s.blob for s in samples])
    return DataProto.from_dict(tensors=tensors, non_tensors=others, meta_info={"temperature": 1.0})


def engine_batch(proto: Any, *, replay: bool = True, **options: Any) -> Any:
    """The TensorDict that an engine gets: the trainer's own conversion, and what the worker adds to it."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    unpadding_without_flash_attention()
    data = left_right_2_no_padding(proto.to_tensordict())
    values: dict[str, Any] = {
        "calculate_entropy": False,
        "compute_loss": False,
        "use_remove_padding": True,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "use_fused_kernels": False,
        "enable_routing_replay": replay,
        "global_batch_size": len(proto),
    }
    tu.assign_non_tensor(data, **{**values, **options})
    return data


def unpadding_without_flash_attention() -> None:
    """verl 0.8 takes two indexing functions from flash-attn, which needs a GPU to build; 0.9 brings its own. Stand-ins for the former."""
    from importlib.util import find_spec

    import verl.workers.utils.padding as padding
    from verl.utils import attention_utils

    if find_spec("flash_attn") or hasattr(attention_utils, "_fallback_unpad_input"):
        return

    def index_first_axis(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return values[indices]

    def unpad_input(values: torch.Tensor, mask: torch.Tensor) -> tuple:
        lengths = mask.sum(1, dtype=torch.int32)
        indices = mask.flatten().nonzero().flatten()
        bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return values.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), lengths

    padding.index_first_axis, padding.unpad_input = index_first_axis, unpad_input
