"""VERL's Megatron engine on a machine without a GPU: a subclass of the host's class that builds its model with Megatron's local layer
spec, where the host would build it with TransformerEngine through a bridge.

Replaced are the two build methods (no bridge, no HF weights), the optimizer (torch's SGD), and the core attention (TransformerEngine's is
the only one in Megatron that takes packed sequences). Everything that the plugin touches is the host's: the constructor, micro-batching,
packing, forward_step, the schedule, the loss, the output.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch

from verl_r3_plugin.cli.demo import megatron_cpu

HF = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "architectures": ["Qwen3MoeForCausalLM"],
}


def hf_config(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**{**HF, **changes})


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence. q: [tokens, heads, dim] (THD), or [tokens, batch, heads, dim] (padded)."""

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params=None, **_):
        groups = query.shape[-2] // key.shape[-2]
        key, value = key.repeat_interleave(groups, -2), value.repeat_interleave(groups, -2)
        if packed_seq_params is None:
            parts = [self._attend(query[:, b], key[:, b], value[:, b]) for b in range(query.shape[1])]
            return torch.stack(parts, 1)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
        return torch.cat([self._attend(query[s], key[s], value[s]).unsqueeze(1) for s in spans]).squeeze(1)

    @staticmethod
    def _attend(query, key, value):
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


class Optimizer:
    """The little of Megatron's optimizer that the host calls."""

    def __init__(self, chunks: list[torch.nn.Module], lr: float) -> None:
        self.parameters = [p for chunk in chunks for p in chunk.parameters()]
        self.sgd = torch.optim.SGD(self.parameters, lr=lr)

    def zero_grad(self) -> None:
        self.sgd.zero_grad()

    def step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.sgd.step()
        return True, norm.item(), None


def local_spec_host(**options: Any) -> type:
    """The host's engine class with the two build methods replaced. options: TransformerConfig's own, and `lr`."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    lr = options.pop("lr", 1.0)

    class LocalSpecEngine(MegatronEngineWithLMHead):
        def _init_device_mesh(self):
            from megatron.core import tensor_parallel

            super()._init_device_mesh()
            # The generator tracker that needs no CUDA; seeding again keeps it.
            tensor_parallel.model_parallel_cuda_manual_seed(self.engine_config.seed, inference_rng_tracker=True)

        def _build_tf_config(self):
            self.is_value_model = False
            self.share_embeddings_and_output_weights = False
            self.param_dtype = self.dtype = torch.float32
            self.provider = self.bridge = self.peft_cls = None
            self.vanilla_bridge = True
            self.tf_config = megatron_cpu.qwen3_moe_config(
                {key: getattr(self.model_config.hf_config, key) for key in HF},
                **{
                    "variable_seq_lengths": True,
                    "moe_token_dispatcher_type": "alltoall",
                    **self.engine_config.override_transformer_config,
                    **options,
                },
            )

        def _build_megatron_module(self):
            from megatron.core import parallel_state as mpu

            config = self.model_config.hf_config
            chunk = megatron_cpu.build_gpt(
                self.tf_config,
                vocab_size=config.vocab_size,
                max_sequence_length=config.max_position_embeddings,
                pre_process=mpu.is_pipeline_first_stage(),
                post_process=mpu.is_pipeline_last_stage(),
            )
            for layer in chunk.decoder.layers:
                layer.self_attention.core_attention = PackedAttention()
            chunk.zero_grad_buffer = lambda: None  # DDP's
            return [chunk]

        def initialize(self):
            self._hf_export_tasks = None
            self._build_tf_config()
            self.module = self._build_megatron_module()
            self.optimizer = None if self.engine_config.forward_only else Optimizer(self.module, lr)

        def to(self, *_args, **_kwargs):
            pass

        def lr_scheduler_step(self):
            return lr

    return LocalSpecEngine


def model_config(**changes: Any) -> Any:
    """What the host's engine reads of HFModelConfig."""
    return SimpleNamespace(
        hf_config=hf_config(**changes),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        model_type="language_model",
        tokenizer=SimpleNamespace(pad_token_id=0),
        lora={},
        get=lambda _key, default=None: default,
    )


def engine_config(mode: str = "R3", **changes: Any) -> Any:
    from verl.workers.config import McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    values = {
        "router_replay": EngineRouterReplayConfig(mode=mode),
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "infer_micro_batch_size_per_gpu": 2,
        "use_distributed_optimizer": False,
    }
    return McoreEngineConfig(**{**values, **changes})


def build_engine(
    *, mode: str = "R3", replaying: bool = True, options: dict[str, Any] | None = None, model: dict | None = None, **changes: Any
) -> Any:
    """An initialised engine in this process (world of one): the replaying one, or the host's own."""
    from verl_r3_plugin.hosts.verl.engine import engine_class

    megatron_cpu.initialise()
    host = local_spec_host(**(options or {}))
    cls = engine_class(host) if replaying else host
    torch.manual_seed(7)
    engine = cls(
        model_config=model_config(**(model or {})),
        engine_config=engine_config(mode, **changes),
        optimizer_config=None,
        checkpoint_config=None,
    )
    torch.manual_seed(7)
    engine.initialize()
    return engine
