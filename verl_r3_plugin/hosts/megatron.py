"""Megatron-core: attach replay to the routers of a built model.

The seam is Megatron's own (0.16 and later): `TopKRouter.routing` passes `self.router_replay` on to the top-k function, which calls its
`get_replay_topk`. An object with that method is put there after the build. No flag is set, nothing is patched, and Megatron's
process-global registry of replay instances stays empty: state belongs to the session and ends with it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..errors import HostError, ReplayError, SchemaError
from ..problem import Problem, refuse
from ..replay.layer import LayerReplay, narrow_dtype, router_freezes
from ..replay.local import LocalRoutes
from ..schema import RouteSchema

_MODULES_WITH_ROUTER = {"moe", "moe_router", "full", "full_iteration"}
_CONFIG_KEY = "actor_rollout_ref.actor.megatron.override_transformer_config."


class MegatronReplayMode:
    """Replay in Megatron-core's decoder routers; the default."""

    name = "megatron"

    def check(self, model_config: Any, schema: RouteSchema) -> list[Problem]:
        return check_config(model_config, schema)

    def attach(self, chunks: Sequence[Any], schema: RouteSchema) -> MegatronReplay:
        return attach(chunks, schema)


class MegatronReplay:
    """Replay attached to the chunks of one model on this rank."""

    def __init__(self, schema: RouteSchema, chunks: Sequence[Any]) -> None:
        self.schema = schema
        self._chunks: weakref.WeakKeyDictionary[Any, list[tuple[int, LayerReplay, weakref.ref]]] = weakref.WeakKeyDictionary()
        self._restore: list[tuple[weakref.ref, Any]] = []
        for chunk in chunks:
            self._chunks[unwrap(chunk)] = [self._take(ordinal, router) for ordinal, router in moe_routers(unwrap(chunk), schema)]

    def layers(self, chunk: Any) -> list[int]:
        """Ordinals (positions in `schema.moe_layers`) of the MoE layers in this chunk."""
        return [ordinal for ordinal, _, _ in self._entries(chunk)]

    @contextmanager
    def step(self, *, statistics: bool = False) -> Iterator[None]:
        """One forward-backward call. Whatever happens in it, the routers choose for themselves afterwards."""
        for _, layer, _ in self._all():
            layer.count(statistics)
        try:
            yield
        finally:
            self.clear()

    def load(self, chunk: Any, routes: LocalRoutes) -> None:
        """Routes of the micro-batch that `chunk` is about to run: one copy to the device, of this chunk's layers and tokens."""
        entries = self._entries(chunk)
        if len(routes.ids) != len(entries):
            raise ReplayError(f"expected routes of {len(entries)} MoE layers for this model chunk, found {len(routes.ids)}")
        if not entries:
            return
        device = next(router().parameters()).device if (router := entries[0][2])() is not None else torch.device("cpu")
        ids = torch.from_numpy(_torch_integers(routes.ids, self.schema.num_experts))
        valid = None if routes.valid.all() else torch.from_numpy(routes.valid).unsqueeze(1)
        ids = _to(ids, device)
        valid = None if valid is None else _to(valid, device)
        for position, (_, layer, _) in enumerate(entries):
            layer.load(ids[position], valid)

    def clear(self) -> None:
        """Forget what was loaded and what waits for a recompute."""
        for _, layer, _ in self._all():
            layer.clear()

    def statistics(self) -> dict[str, float]:
        """Sums since the last call over this rank's layers: agreed and compared experts, equal_rows and rows; waits for the device once."""
        counts = [taken for _, layer, _ in self._all() if (taken := layer.take_counts()) is not None]
        sums = torch.stack([c.cpu() for c in counts]).sum(0).tolist() if counts else [0.0] * 4
        return dict(zip(("agreed", "compared", "equal_rows", "rows"), sums, strict=True))

    def detach(self) -> None:
        """Give every router back what it had."""
        for router, before in self._restore:
            if (alive := router()) is not None:
                alive.router_replay = before
        self._restore.clear()
        self._chunks.clear()

    def _take(self, ordinal: int, router: Any) -> tuple[int, LayerReplay, weakref.ref]:
        reference = weakref.ref(router)

        def freezes() -> bool:
            alive = reference()
            return alive is not None and router_freezes(alive)

        name = f"MoE layer {self.schema.moe_layers[ordinal]}"
        layer = LayerReplay(name, self.schema.num_experts, self.schema.top_k, freezes)
        layer.layer_number = router.layer_number
        self._restore.append((reference, router.router_replay))
        router.router_replay = layer
        return ordinal, layer, reference

    def _entries(self, chunk: Any) -> list[tuple[int, LayerReplay, weakref.ref]]:
        found = self._chunks.get(unwrap(chunk))
        if found is None:
            raise ReplayError("expected a model chunk that replay was attached to, found another one (was the model built again?)")
        return found

    def _all(self) -> Iterator[tuple[int, LayerReplay, weakref.ref]]:
        for entries in self._chunks.values():
            yield from entries


def attach(chunks: Sequence[Any], schema: RouteSchema) -> MegatronReplay:
    """Replay for the decoder routers of a model's chunks on this rank (pipeline and virtual pipeline stages).

    Routers of MTP layers, and of any other model in the process, are left alone. Raises HostError where this Megatron has no seam,
    ConfigError where a setting bypasses it, SchemaError where the routers are not those that the schema describes.
    """
    check_seam()
    chunks = list(chunks) if isinstance(chunks, (list, tuple)) else [chunks]
    for chunk in chunks:
        refuse(check_config(unwrap(chunk).config, schema))
    return MegatronReplay(schema, chunks)


def check_seam() -> None:
    """HostError unless the installed Megatron-core asks `router_replay` for its top-k."""
    import megatron.core
    from megatron.core.transformer.moe import moe_utils, router

    version = getattr(megatron.core, "__version__", "of an unknown version")
    function = getattr(moe_utils, "topk_routing_with_score_function", None)
    if function is None or "router_replay" not in inspect.signature(function).parameters:
        raise HostError(
            "expected megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function to take 'router_replay' (megatron-core "
            f"0.16 and later), found megatron-core {version} without it; install megatron-core>=0.16"
        )
    if "router_replay" not in inspect.getsource(router.TopKRouter):
        raise HostError(
            f"expected TopKRouter to pass its router_replay on, found one that does not (megatron-core {version}, or a patched router); "
            "replay would be silently off"
        )
    routing = inspect.unwrap(router.TopKRouter.routing)
    if routing.__module__ != router.__name__:
        raise HostError(
            f"expected Megatron's own TopKRouter.routing, found one from {routing.__module__}: another package has replaced it. "
            "VERL's router patch must not be applied together with this plugin"
        )


def unwrap(chunk: Any) -> Any:
    """The model inside DDP, Float16Module and the like."""
    while not hasattr(chunk, "decoder") and not hasattr(chunk, "language_model") and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def moe_routers(chunk: Any, schema: RouteSchema) -> list[tuple[int, Any]]:
    """(ordinal in schema.moe_layers, router) of each decoder router of an unwrapped chunk, by layer.

    Only modules that the chunk's decoder reaches count: some bridges build a decoder twice and drop one.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    language_model = getattr(chunk, "language_model", chunk)
    decoder = getattr(language_model, "decoder", None)
    if decoder is None:
        raise HostError(f"expected a model chunk with a decoder, found {type(language_model).__name__} without one")
    pattern = _hybrid_pattern(language_model)
    found = []
    for router in decoder.modules():
        if not isinstance(router, TopKRouter) or getattr(router, "is_mtp_layer", False):
            continue
        if pattern is not None:
            ordinal = pattern[: router.layer_number - 1].count("E")
        else:
            layer = router.layer_number - 1
            if layer not in schema.moe_layers:
                raise SchemaError(
                    f"expected MoE layers {list(schema.moe_layers)}, found a router in decoder layer {layer}; "
                    "is actor_rollout_ref.model.path the model that the rollout engine serves?"
                )
            ordinal = schema.moe_layers.index(layer)
        found.append((ordinal, router))
    found.sort(key=lambda entry: entry[0])
    ordinals = [ordinal for ordinal, _ in found]
    if len(set(ordinals)) != len(ordinals):
        raise SchemaError(f"expected one router a MoE layer, found layers {ordinals}")
    if pattern is None:
        present = {layer.layer_number - 1 for layer in decoder.layers}
        missing = [layer for layer in schema.moe_layers if layer in present and schema.moe_layers.index(layer) not in ordinals]
        if missing:
            raise SchemaError(f"expected a router in decoder layers {missing}, found dense layers there")
    return found


def check_config(config: Any, schema: RouteSchema) -> list[Problem]:
    """Settings of a TransformerConfig under which the seam is bypassed, or the routes cannot be this model's."""
    problems = []

    def error(key: str, message: str, fix: str) -> None:
        problems.append(Problem("error", _CONFIG_KEY + key, message, fix))

    if getattr(config, "moe_router_fusion", False):
        error("moe_router_fusion", "the fused top-k never looks at replayed routes, so replay would be silently off", "set it to false")
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind in ("sinkhorn", "quantile_balancing"):
            error("moe_router_load_balancing_type", f"{kind} routing chooses experts without asking for replayed routes", "set it to none")
    if getattr(config, "moe_n_hash_layers", 0):
        error("moe_n_hash_layers", "hash routing chooses experts by token id and cannot be replayed", "use a model without hash layers")
    graphs = _captured_routers(config)
    if graphs:
        error(graphs, "a captured router replays old addresses and would never see new routes", "leave the router out of CUDA graphs")
    if config.num_moe_experts != schema.num_experts or config.moe_router_topk != schema.top_k:
        error(
            "num_moe_experts",
            f"the routes are of top-{schema.top_k} of {schema.num_experts} experts, the actor has top-{config.moe_router_topk} of "
            f"{config.num_moe_experts}",
            "use one model for rollout and actor (actor_rollout_ref.model.path)",
        )
    factor = getattr(config, "moe_expert_capacity_factor", None)
    if factor is not None:
        share = f"an expert keeps at most {factor} x tokens x {schema.top_k} / {schema.num_experts} tokens"
        problems.append(
            Problem(
                "warning", _CONFIG_KEY + "moe_expert_capacity_factor", f"{share}, and replayed pairs above that are dropped", "unset it"
            )
        )
    return problems


def _captured_routers(config: Any) -> str | None:
    """The key that puts routers into a CUDA graph, if one does."""
    implementation = getattr(config, "cuda_graph_impl", None)
    if implementation in (None, "none"):
        return "external_cuda_graph" if getattr(config, "external_cuda_graph", False) else None
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        modules = getattr(config, name, None)
        modules = [modules] if isinstance(modules, str) else list(modules or [])
        if {str(getattr(module, "name", module)).lower() for module in modules} & _MODULES_WITH_ROUTER:
            return name
    named = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None)
    return None if named else "cuda_graph_impl"  # no module named: whole layers are captured


def _hybrid_pattern(model: Any) -> str | None:
    """One letter a sublayer ('E' = MoE) for HybridModel, whose layer numbers count sublayers; else None."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        pattern = getattr(model, name, None)
        if isinstance(pattern, str) and pattern:
            return pattern.split("/")[0].replace("|", "")
    return None


def _torch_integers(ids: np.ndarray, num_experts: int) -> np.ndarray:
    wanted = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}[narrow_dtype(num_experts)]
    return np.ascontiguousarray(ids.astype(wanted, copy=False))


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device without making the host wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
