"""Which tokens this rank's routers see, and in which order.

Between the batch and a router VERL pads every sequence, splits it over context-parallel ranks (zigzag or contiguous), adds fp8 and
bucket padding, and Megatron scatters the result over tensor-parallel ranks. None of that is repeated here: token *numbers* are sent
through the host's own functions, with the arguments the host itself will use, and what comes out says which row belongs where. All of
it happens on the CPU, before the batch moves to the device, so no step waits for the device because of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...errors import HostError

_FP8_RECIPES_THAT_PAD = ("e4m3", "hybrid")


def local_rows(input_ids: torch.Tensor, chunk: Any, engine_config: Any, *, fused: bool, batch_options: dict[str, Any]) -> np.ndarray:
    """[local_tokens] int64: for each token in the order in which this rank's routers get them, its number among the unpadded tokens of
    `input_ids` (jagged, [batch, tokens]), or -1 where the host puts padding.

    chunk: the unwrapped Megatron model (chunk) that is about to run. fused: whether the host uses its fused forward.
    batch_options: what the host reads from this micro-batch, `local_cp_size` and `forced_max_seqlen`.
    """
    offsets = input_ids.offsets().cpu()
    # Numbers start at 1 because the host fills padding with 0.
    numbers = torch.nested.nested_tensor_from_jagged(torch.arange(1, int(offsets[-1]) + 1), offsets=offsets)
    config = chunk.config
    if fused or engine_config.use_remove_padding:
        placed = _packed(numbers, config, engine_config, fused, batch_options)
    else:
        placed = _padded(numbers, config, batch_options)
    return placed.numpy() - 1


def _packed(numbers: torch.Tensor, config: Any, engine_config: Any, fused: bool, batch_options: dict[str, Any]) -> torch.Tensor:
    """[local_tokens]: one row of packed sequences (THD)."""
    from verl.models.mcore.util import preprocess_thd_engine

    contiguous = getattr(config, "experimental_attention_variant", None) == "dsv4_hybrid"
    wanted = {
        "use_fp8_padding": (config.fp8 in _FP8_RECIPES_THAT_PAD, False),
        "local_cp_size": (batch_options.get("local_cp_size"), None),
        "pad_to_length_bucket": (_bucket(engine_config), None),
        "cp_layout": ("contiguous" if contiguous else "zigzag", "zigzag"),
        "min_local_rows": (config.csa_window_size if contiguous and fused else None, None),
    }
    packed = preprocess_thd_engine(numbers, pre_process=True, **_accepted(preprocess_thd_engine, wanted))[0].squeeze(0)
    return _sequence_parallel_share(packed, config)


def _padded(numbers: torch.Tensor, config: Any, batch_options: dict[str, Any]) -> torch.Tensor:
    """[local_tokens]: a padded batch (BSHD). Megatron runs it sequence first: the routers see token 0 of every sequence, then token 1."""
    from verl.models.mcore.util import preprocess_bshd_engine

    wanted = {
        "use_fp8_padding": (config.fp8 in _FP8_RECIPES_THAT_PAD, False),
        "forced_max_seqlen": (batch_options.get("forced_max_seqlen"), None),
    }
    padded = preprocess_bshd_engine(numbers, pre_process=True, **_accepted(preprocess_bshd_engine, wanted))[0]
    return _sequence_parallel_share(padded.transpose(0, 1).contiguous(), config).reshape(-1)


def _sequence_parallel_share(tokens: torch.Tensor, config: Any) -> torch.Tensor:
    """This tensor-parallel rank's consecutive share of the first dimension, where the model runs sequence-parallel."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or not config.sequence_parallel:
        return tokens
    if len(tokens) % size:
        raise HostError(
            f"expected VERL to pad {len(tokens)} tokens to a multiple of tensor_model_parallel_size={size}, found that it does not; "
            "actor_rollout_ref.actor.megatron.sequence_parallel=false avoids the split"
        )
    return tokens.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


def _bucket(engine_config: Any) -> int | None:
    if getattr(engine_config, "pad_to_length", False) and engine_config.use_remove_padding:
        return engine_config.pad_to_length_bucket
    return None


def _accepted(function: Callable[..., Any], wanted: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Of `wanted` (name -> (value, the value that asks for nothing)) what `function` takes; refuses to drop a real request."""
    parameters = inspect.signature(function).parameters
    for name, (value, neutral) in wanted.items():
        if name not in parameters and value != neutral:
            raise HostError(
                f"expected {function.__module__}.{function.__name__} to take {name!r} (this run needs {value!r}), "
                f"found {list(parameters)}; routes cannot be placed in this layout with the installed verl"
            )
    return {name: value for name, (value, _) in wanted.items() if name in parameters}
