"""What a route row looks like for a model: how many experts, how many of them per token, and in which decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
