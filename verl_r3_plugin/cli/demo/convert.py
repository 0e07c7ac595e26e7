"""Qwen3-MoE weights: a checkpoint's names and layout <-> Megatron-core's GPTModel with the local layer spec.

The bridges that do this for VERL name TransformerEngine's fused modules; without TransformerEngine these few lines are needed. A test
shows that the converted model gives the logits of the Hugging Face one.
"""

from __future__ import annotations

from typing import Any

import torch

_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def load_into(model: torch.nn.Module, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Copy a checkpoint's weights into a whole (PP=TP=EP=1) model; KeyError names a tensor that is missing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_to_megatron(name, weights, config))


def weights_of(model: torch.nn.Module, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, bfloat16, from a whole model; the inverse of `load_into`."""
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for hf_name, tensor in _to_hf(name, parameter.detach(), config).items():
            weights[hf_name] = tensor.bfloat16().clone()
    return weights


def _to_megatron(name: str, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    if name in _ENDS:
        return weights[_ENDS[name]]
    layer, rest = _split(name)
    at = f"model.layers.{layer}."
    if rest in _NORMS:
        return weights[at + _NORMS[rest]]
    if rest == "self_attention.linear_qkv.weight":
        # Megatron keeps, per group of query heads, the queries and then their key and value.
        groups, head, hidden = config["num_key_value_heads"], config["head_dim"], config["hidden_size"]
        parts = [weights[f"{at}self_attn.{part}_proj.weight"].view(groups, -1, head, hidden) for part in "qkv"]
        return torch.cat(parts, dim=1).reshape(-1, hidden)
    prefix, half = _mlp(rest)
    if half == "linear_fc1.weight":
        return torch.cat([weights[f"{at}{prefix}gate_proj.weight"], weights[f"{at}{prefix}up_proj.weight"]])
    return weights[f"{at}{prefix}down_proj.weight"]


def _to_hf(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    if name in _ENDS:
        return {_ENDS[name]: tensor}
    layer, rest = _split(name)
    at = f"model.layers.{layer}."
    if rest in _NORMS:
        return {at + _NORMS[rest]: tensor}
    if rest == "self_attention.linear_qkv.weight":
        groups, head, hidden = config["num_key_value_heads"], config["head_dim"], config["hidden_size"]
        queries = config["num_attention_heads"] // groups
        split = tensor.view(groups, queries + 2, head, hidden).split([queries, 1, 1], dim=1)
        return {f"{at}self_attn.{part}_proj.weight": piece.reshape(-1, hidden) for part, piece in zip("qkv", split, strict=True)}
    prefix, half = _mlp(rest)
    if half == "linear_fc1.weight":
        gate, up = tensor.chunk(2)
        return {f"{at}{prefix}gate_proj.weight": gate, f"{at}{prefix}up_proj.weight": up}
    return {f"{at}{prefix}down_proj.weight": tensor}


def _split(name: str) -> tuple[int, str]:
    """'decoder.layers.3.mlp.router.weight' -> (3, 'mlp.router.weight')."""
    _, _, layer, rest = name.split(".", 3)
    return int(layer), rest


def _mlp(rest: str) -> tuple[str, str]:
    """'mlp.experts.local_experts.7.linear_fc1.weight' -> ('mlp.experts.7.', 'linear_fc1.weight')."""
    prefix, matrix, kind = rest.rsplit(".", 2)
    return prefix.replace(".local_experts", "") + ".", f"{matrix}.{kind}"
