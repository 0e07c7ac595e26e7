"""What a route row looks like for a model: how many experts, how many of them per token, and in which decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import SchemaError

MAX_EXPERTS = 65_536
MAX_TOP_K = 255
MAX_LAYERS = 65_535


@dataclass(frozen=True)
class RouteSchema:
    """Shape of the routes of one model.

    num_experts: E, routed experts per MoE layer (shared experts are not routed).
    top_k: K, experts per token and MoE layer.
    num_layers: decoder layers, dense ones included and MTP layers not; the layer axis of vLLM's array.
    moe_layers: indices (0-based, ascending) of the decoder layers that have a router.
    """

    num_experts: int
    top_k: int
    num_layers: int
    moe_layers: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_layers", tuple(int(layer) for layer in self.moe_layers))
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise SchemaError(f"expected 1 to {MAX_EXPERTS} experts, found {self.num_experts}")
        if not 1 <= self.top_k <= min(self.num_experts, MAX_TOP_K):
            raise SchemaError(f"expected a top-k between 1 and {min(self.num_experts, MAX_TOP_K)}, found {self.top_k}")
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise SchemaError(f"expected 1 to {MAX_LAYERS} decoder layers, found {self.num_layers}")
        layers = self.moe_layers
        if not layers:
            raise SchemaError(f"expected at least one MoE layer among {self.num_layers}, found none: a dense model has no router")
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers:
            raise SchemaError(f"expected ascending layer indices below {self.num_layers}, found {layers}")

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def id_dtype(self) -> np.dtype:
        """The narrowest dtype that holds an expert id."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    def select_layers(self, ordinals: Sequence[int]) -> RouteSchema:
        """The schema of only the MoE layers at these positions (ascending) of `moe_layers`."""
        ordinals = list(ordinals)
        # Checked here, since a negative position would count from the end.
        if not ordinals or min(ordinals) < 0 or max(ordinals) >= self.num_moe_layers:
            raise SchemaError(f"expected at least one position below {self.num_moe_layers} of a MoE layer, found {ordinals}")
        return RouteSchema(self.num_experts, self.top_k, self.num_layers, tuple(self.moe_layers[i] for i in ordinals))

    @classmethod
    def from_hf_config(cls, config: Any) -> RouteSchema:
        """The schema of the decoder that a Hugging Face config describes (the object, or the mapping of a `config.json`).

        Known ways to say which layers are MoE: `mlp_only_layers` with `decoder_sparse_step` (Qwen), `first_k_dense_replace` with
        `moe_layer_freq` (DeepSeek, GLM), `mlp_layer_types`, `moe_layers` or a list `moe_layer_freq` (one entry a layer), the start, end
        and interval of ERNIE, and the pattern of a hybrid model ('E'). A multimodal config is read in its `text_config`. MTP layers are no
        decoder layers and have no row.
        """
        read = _reader(config)
        experts = read("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
        top_k = read("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
        layers = read("num_hidden_layers", "num_layers", "n_layer")
        if not experts or not top_k or not layers:
            raise SchemaError(
                f"expected a model config with experts, experts per token and layers, found {experts}, {top_k} and {layers} in "
                f"{read('model_type')!r}: a dense model has no router, and router_replay.mode must be disabled for it"
            )
        return cls(int(experts), int(top_k), int(layers), tuple(_moe_layers(read, int(layers))))


def _reader(config: Any) -> Callable[..., Any]:
    """read(*names): the first of these that the decoder's config has and that is not None."""
    sections = [config]
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        nested = _value(sections[-1], name)
        if nested is not None:
            sections.append(nested)

    def read(*names: str) -> Any:
        for section in reversed(sections):  # the decoder's own section before the whole model's
            for name in names:
                value = _value(section, name)
                if value is not None:
                    return value
        return None

    return read


def _value(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def _moe_layers(read: Callable[..., Any], layers: int) -> list[int]:
    every = range(layers)
    pattern = read("hybrid_override_pattern", "hybrid_layer_pattern")
    if isinstance(pattern, str) and "E" in pattern:
        return [layer for layer, kind in enumerate(pattern.split("/")[0].replace("|", "")) if kind == "E"]
    kinds = read("mlp_layer_types")
    if kinds is not None:
        return [layer for layer, kind in enumerate(kinds[:layers]) if kind != "dense"]
    explicit = read("moe_layers")
    if isinstance(explicit, (list, tuple)):
        return sorted(int(layer) for layer in explicit)
    frequency = read("moe_layer_freq")
    if isinstance(frequency, (list, tuple)):
        return [layer for layer, sparse in enumerate(frequency[:layers]) if sparse]
    first, last = read("moe_layer_start_index"), read("moe_layer_end_index")
    if isinstance(first, int) and isinstance(last, int):
        interval = read("moe_layer_interval") or 1
        return [layer for layer in every if first <= layer <= (last if last >= 0 else layers - 1) and (layer + 1) % interval == 0]
    dense = set(read("mlp_only_layers") or [])
    step, leading = read("decoder_sparse_step") or 1, read("first_k_dense_replace") or 0
    return [
        layer for layer in every if layer >= leading and layer not in dense and (layer + 1) % step == 0 and layer % (frequency or 1) == 0
    ]
