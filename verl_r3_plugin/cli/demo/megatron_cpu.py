"""What Megatron-core needs to run on a machine without CUDA, and a builder for small models there.

Megatron-core takes a CUDA device for granted in a handful of places. `stand_in()` replaces those names by CPU equivalents, each with the
reason beside it; everything that computes (attention, router, experts, schedules, gradients) stays Megatron's own. For the demo and
the tests only, and refused where CUDA is available.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import HostError

STAND_INS = {
    "torch.cuda.current_device": "memory buffers, router buffers and pipeline exchange ask it where to allocate",
    "torch.cuda.synchronize": "pipeline exchange waits for the device",
    "torch.cuda.Stream, Event, stream, current_stream": "the all-to-all dispatcher overlaps copies on a side stream",
    "device='cuda' literals, Tensor.cuda(), pin_memory": "pipeline schedules and optimizer allocate with a literal device",
    "token_dispatcher.maybe_move_tensor_to_cpu": "split sizes stay tensors when they are on the CPU already",
    "tensor_parallel.random._get/_set_cuda_rng_state": "activation recompute saves the CUDA generator",
    "moe_utils.te_general_gemm": "0.16 names it without TransformerEngine installed",
}


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any, **__: Any) -> _Event:
        return self

    def synchronize(self) -> None: ...

    def wait(self, *_: Any, **__: Any) -> None: ...


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _CudaLiteralsToCpu(TorchFunctionMode):
    """Functions called with device='cuda' allocate on the CPU instead."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


_installed: list[TorchFunctionMode] = []


def stand_in() -> None:
    """Replace what STAND_INS lists, once in this process. HostError where CUDA is available: there Megatron needs none of it."""
    if torch.cuda.is_available():
        raise HostError("expected a machine without CUDA, found one with it; Megatron-core needs no stand-ins there")
    if _installed:
        return
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    stream = _Stream()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # classes: other libraries annotate with them
    torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    mode = _CudaLiteralsToCpu()
    mode.__enter__()
    _installed.append(mode)

    import megatron.core.tensor_parallel.random as parallel_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    parallel_random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0, dtype=torch.uint8)
    parallel_random._set_cuda_rng_state = lambda *_, **__: None
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def initialise(
    *, tp: int = 1, pp: int = 1, ep: int = 1, vpp: int | None = None, cp: int = 1, etp: int | None = 1, port: int = 0, seed: int = 1234
) -> None:
    """Process group (gloo, loopback) and Megatron's parallel state; rank and world size from the environment, as torchrun sets them."""
    from megatron.core import parallel_state, tensor_parallel

    stand_in()
    if not torch.distributed.is_initialized():
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if world == 1:
            store: Any = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world, store=store)
        else:
            address = f"tcp://127.0.0.1:{port or os.environ['MASTER_PORT']}"
            torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    sizes = dict(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
    )
    if etp is not None:
        sizes["expert_tensor_parallel_size"] = etp
    parallel_state.initialize_model_parallel(**sizes)
    options = {"inference_rng_tracker": True}  # the tracker that needs no CUDA generator
    if "force_reset_rng" in inspect.signature(tensor_parallel.model_parallel_cuda_manual_seed).parameters:
        options["force_reset_rng"] = True
    tensor_parallel.model_parallel_cuda_manual_seed(seed, **options)


CPU_OPTIONS = dict(
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    add_bias_linear=False,
    moe_token_dispatcher_type="allgather",
    moe_router_load_balancing_type="none",
)
"""Official options under which a model runs on a CPU and computes the same twice."""


def qwen3_moe_config(hf: dict[str, Any], **overrides: Any) -> Any:
    """TransformerConfig of a Qwen3-MoE `config.json`; overrides are TransformerConfig's own."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    layers, dense, step = hf["num_hidden_layers"], set(hf.get("mlp_only_layers") or []), hf.get("decoder_sparse_step", 1)
    values = dict(
        num_layers=layers,
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        ffn_hidden_size=hf["intermediate_size"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        num_moe_experts=hf["num_experts"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_layer_freq=[int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)],
        # Qwen3 with norm_topk_prob: softmax over the chosen, which equals a softmax over all, renormalised.
        moe_router_pre_softmax=not hf["norm_topk_prob"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        **CPU_OPTIONS,
    )
    return TransformerConfig(**{**values, **overrides})


def build_gpt(
    config: Any,
    *,
    vocab_size: int,
    max_sequence_length: int,
    rotary_base: float = 10_000.0,
    tied: bool = False,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> torch.nn.Module:
    """GPTModel with Megatron's local layer spec (no TransformerEngine)."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    spec_options = {"normalization": config.normalization} if config.normalization != "LayerNorm" else {}
    accepted = inspect.signature(get_gpt_decoder_block_spec).parameters
    spec_options = {name: value for name, value in spec_options.items() if name in accepted}
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **spec_options, **stage)
    return GPTModel(
        config,
        spec,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        position_embedding_type="rope",
        rotary_base=rotary_base,
        share_embeddings_and_output_weights=tied,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        **stage,
    )


@contextlib.contextmanager
def record_routing_maps(chunks: Sequence[Any]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """What the decoder routers really emit: {0-based layer: bool [tokens, experts] of each forward pass}.

    A forward hook on the router itself, which knows nothing of replay or of our bytes: the demo's proof compares with it.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    maps: dict[int, list[torch.Tensor]] = {}
    handles = []
    for chunk in chunks:
        for router in chunk.decoder.modules():
            if isinstance(router, TopKRouter):
                layer = router.layer_number - 1

                def keep(_module: Any, _inputs: Any, output: Any, layer: int = layer) -> None:
                    maps.setdefault(layer, []).append(output[1].detach().bool().clone())

                handles.append(router.register_forward_hook(keep))
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()
