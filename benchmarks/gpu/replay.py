"""Replay on a GPU, Megatron-core's local layer spec: is it exact, does it make the host wait, and what does it cost?

    python benchmarks/gpu/replay.py [--out FILE] [--parts exact waits router model] [--device cuda|cpu] [--tiny]

One JSON object a line, written as it comes. Needs megatron-core and this package; no TransformerEngine, no vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_r3_plugin.cli.demo import megatron_cpu
from verl_r3_plugin.field import pack
from verl_r3_plugin.hosts.megatron import attach
from verl_r3_plugin.replay.layer import LayerReplay
from verl_r3_plugin.replay.local import LocalRoutes
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema
from verl_r3_plugin.trajectory import Trajectory

VOCABULARY = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="Small enough for a CPU.")
    parser.add_argument("--parts", nargs="+", default=["exact", "waits", "router", "model"])
    chosen = parser.parse_args()
    initialise(chosen.device)
    lines = chosen.out.open("w") if chosen.out else None

    def tell(**figures: Any) -> None:
        text = json.dumps(figures)
        print(text, flush=True)
        if lines:
            lines.write(text + "\n")
            lines.flush()

    device = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    tell(part="machine", device=device, torch=torch.__version__)
    if "exact" in chosen.parts:
        # Megatron's scatters add in any order on a GPU unless told otherwise, and then not even live routing repeats its own bits.
        torch.use_deterministic_algorithms(True, warn_only=True)
        for dtype in (torch.float32, torch.bfloat16):
            for dispatcher in ("allgather", "alltoall"):
                for recompute in (False, True):
                    tell(part="exact", **exact(chosen.device, dtype, dispatcher, recompute, chosen.tiny))
        torch.use_deterministic_algorithms(False)
    if "waits" in chosen.parts and chosen.device == "cuda":
        tell(part="waits", **waits())
    for experts, top_k in ((128, 8), (256, 8)):
        if "router" in chosen.parts:
            tell(part="router", **router_cost(chosen.device, experts, top_k, chosen.tiny))
        if "model" in chosen.parts:
            tell(part="model", **model_cost(chosen.device, experts, top_k, chosen.tiny))


def initialise(device: str) -> None:
    """One process's parallel state."""
    if device == "cpu":
        megatron_cpu.initialise()
        return
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def build(device: str, dtype: torch.dtype, experts: int, top_k: int, *, layers: int, hidden: int, **more: Any) -> torch.nn.Module:
    """A Qwen3-MoE-like GPTModel whose first layer is dense."""
    torch.manual_seed(0)
    hf = {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": hidden // 8,
        "intermediate_size": 2 * hidden, "moe_intermediate_size": hidden // 2, "num_experts": experts, "num_experts_per_tok": top_k,
        "mlp_only_layers": [0], "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    precision = {"bf16": True, "params_dtype": torch.bfloat16} if dtype == torch.bfloat16 else {}
    config = megatron_cpu.qwen3_moe_config(hf, use_cpu_initialization=device == "cpu", **precision, **more)
    model = megatron_cpu.build_gpt(config, vocab_size=VOCABULARY, max_sequence_length=4096)
    return model.to(device=device, dtype=dtype).train()


def inputs(device: str, rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.arange(tokens, device=device).expand(rows, tokens).contiguous()
    causal = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool, device=device), 1)[None, None]
    return ids, positions, causal


def run(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(*batch, labels=batch[0])
    loss.float().mean().backward()
    return loss.detach().clone(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def local_routes(schema: RouteSchema, ids: torch.Tensor, rows: np.ndarray, absent: float = 0.0) -> LocalRoutes:
    """What a rank with all layers would be given. rows: [sequences, tokens, MoE layers, top_k], in the order to be replayed."""
    count, tokens = ids.shape
    random, blobs, sequences = np.random.default_rng(2), [], []
    for row in range(count):
        kept = random.random(tokens) >= absent
        kept[-1] = False
        routes = RoutedExperts(schema, np.ascontiguousarray(rows[row]).astype(schema.id_dtype), np.ones(tokens, np.bool_)).drop(~kept)
        sequences.append(ids[row].cpu().numpy())
        none = np.full(tokens, -1)
        blobs.append(pack(Trajectory(sequences[-1], routes, none, none), encoding="raw"))
    numbers = (np.arange(count) * tokens + np.arange(tokens)[:, None]).reshape(-1)
    return LocalRoutes.gather(blobs, sequences, numbers, range(schema.num_moe_layers), schema)


def exact(device: str, dtype: torch.dtype, dispatcher: str, recompute: bool, tiny: bool) -> dict[str, Any]:
    """Own routes give the same bits, random routes are exactly the ones emitted, absent rows are routed live."""
    experts, top_k, layers = (16, 4, 3) if tiny else (128, 8, 6)
    options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}
    model = build(device, dtype, experts, top_k, layers=layers, hidden=64 if tiny else 512, moe_token_dispatcher_type=dispatcher, **options)
    schema = RouteSchema(experts, top_k, layers, tuple(range(1, layers)))
    batch = inputs(device, 2, 16 if tiny else 512)
    count, tokens = batch[0].shape
    recorder = Recorder(model)
    live, live_gradients = run(model, batch)
    own = recorder.take(count, tokens, schema)
    again, again_gradients = run(model, batch)
    replay = attach([model], schema)
    with replay.step(statistics=True):
        replay.load(model, local_routes(schema, batch[0], own))
        with megatron_cpu.record_routing_maps([model]):
            loss, gradients = run(model, batch)
    statistics_of_own = replay.statistics()
    random = np.random.default_rng(3).random((count, tokens, schema.num_moe_layers, experts)).argsort(axis=3)[..., :top_k]
    emitted = {}
    for name, absent in (("all", 0.0), ("some", 0.1)):
        routes = local_routes(schema, batch[0], random, absent)
        with replay.step(), megatron_cpu.record_routing_maps([model]) as maps:
            replay.load(model, routes)
            run(model, batch)
        same, repeated = [], []
        for position, layer in enumerate(schema.moe_layers):
            given = torch.zeros_like(maps[layer][0])
            given.scatter_(1, torch.from_numpy(routes.ids[position].astype(np.int64)).to(given.device), True)
            valid = torch.from_numpy(routes.valid).to(given.device)
            same.append(bool((maps[layer][0] == given)[valid].all()))
            full = maps[layer][0].sum(1) == top_k
            same.append(bool(full.all()))
            repeated.append(all(torch.equal(maps[layer][0], other) for other in maps[layer][1:]))
        emitted[name] = all(same) and all(repeated)
    replay.detach()
    recorder.detach()

    def largest(one: dict[str, torch.Tensor]) -> float:
        return max(float((live_gradients[name] - one[name]).abs().max()) for name in live_gradients)

    return {
        "dtype": str(dtype), "dispatcher": dispatcher, "recompute": recompute,
        "live_twice_loss_bits_equal": bool(torch.equal(live, again)), "live_twice_largest_gradient_difference": largest(again_gradients),
        "own_routes_loss_bits_equal": bool(torch.equal(live, loss)), "own_routes_largest_gradient_difference": largest(gradients),
        "largest_gradient": max(float(g.abs().max()) for g in live_gradients.values()),
        "agreement": statistics_of_own["agreed"] / statistics_of_own["compared"],
        "random_routes_exact": emitted["all"], "absent_rows_live_others_exact": emitted["some"],
    }  # fmt: skip


class Recorder:
    """The live choice in the router's own order, through the same seam, so that bits can be compared."""

    def __init__(self, model: torch.nn.Module) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self.routers = sorted((m for m in model.modules() if isinstance(m, TopKRouter)), key=lambda router: router.layer_number)
        self.seen: dict[int, torch.Tensor] = {}
        for router in self.routers:
            router.router_replay = _Recording(self.seen, router.layer_number)

    def take(self, rows: int, tokens: int, schema: RouteSchema) -> np.ndarray:
        """[rows, tokens, MoE layers, top_k]"""
        found = np.stack([self.seen[layer + 1].cpu().numpy() for layer in schema.moe_layers], axis=1)
        return found.reshape(tokens, rows, schema.num_moe_layers, schema.top_k).transpose(1, 0, 2, 3)

    def detach(self) -> None:
        for router in self.routers:
            router.router_replay = None


class _Recording:
    def __init__(self, seen: dict[int, torch.Tensor], layer: int) -> None:
        self.seen, self.layer_number = seen, layer

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.seen.setdefault(self.layer_number, ids.detach())
        return values, ids


def one_router(device: str, experts: int, top_k: int, tokens: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """(router, hidden states, ids [tokens, top_k] on the device)"""
    hidden = 2048 if device == "cuda" else 64
    model = build(device, torch.bfloat16, experts, top_k, layers=2, hidden=hidden)
    router = model.decoder.layers[1].mlp.router
    states = torch.randn(tokens, 1, hidden, device=device, dtype=torch.bfloat16)
    ids = torch.from_numpy(np.random.default_rng(0).random((tokens, experts)).argsort(1)[:, :top_k].astype(np.uint8)).to(device)
    return router, states, ids


def waits() -> dict[str, Any]:
    """Whether a replayed router makes the host wait for the device: torch raises at a synchronisation here."""
    router, states, ids = one_router("cuda", 128, 8, 4096)
    some = torch.ones(4096, 1, dtype=torch.bool, device="cuda")
    some[::10] = False
    found = {}
    for name, valid, counting in (("all rows valid", None, False), ("some absent", some, False), ("with statistics", some, True)):
        layer = LayerReplay(name, 128, 8)
        layer.load(ids, valid)
        layer.count(counting)
        router.router_replay = layer
        router(states)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            router(states)
            found[name] = False
        except RuntimeError as error:
            found[name] = str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    router.router_replay = None
    return {"host_waits": found}


def paired(variants: dict[str, Any], once: Any, device: str, rounds: int) -> dict[str, Any]:
    """Medians (ms), and the median and quartiles of each variant's ratio to `live` within a round."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 3):
        for name, variant in variants.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            once(variant)
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 3:
                times[name].append((time.perf_counter() - began) * 1e3)
    found: dict[str, Any] = {"median_ms": {name: round(statistics.median(values), 4) for name, values in times.items()}, "ratio": {}}
    for name, values in times.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(values, times["live"], strict=True)], n=4)
        found["ratio"][name] = [round(low, 4), round(middle, 4), round(high, 4)]
    return found


def router_cost(device: str, experts: int, top_k: int, tiny: bool) -> dict[str, Any]:
    """Forward and backward of one router, 20 times in a row so that launch jitter averages out."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    tokens = 512 if tiny else 32_768
    router, states, ids = one_router(device, experts, top_k, tokens)
    native = RouterReplay()
    native.set_target_indices(ids.long())
    native.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    some = torch.ones(tokens, 1, dtype=torch.bool, device=device)
    some[::10] = False
    variants: dict[str, Any] = {"live": None, "Megatron's own replay": native}
    for name, valid, counting in (("replay", None, False), ("replay, 10 % absent", some, False), ("replay with statistics", None, True)):
        variants[name] = layer = LayerReplay(name, experts, top_k)
        layer.load(ids, valid)
        layer.count(counting)

    def once(replay: Any) -> None:
        router.router_replay = replay
        for _ in range(2 if tiny else 20):
            probabilities, _ = router(states)
            probabilities.float().sum().backward()

    found = paired(variants, once, device, 5 if tiny else 40)
    RouterReplay.global_router_replay_instances.clear()
    return {"experts": experts, "top_k": top_k, "tokens": tokens, **found}


def model_cost(device: str, experts: int, top_k: int, tiny: bool) -> dict[str, Any]:
    """Forward and backward of a model, the copy of the routes to the device counted in."""
    layers, hidden, rows, tokens = (3, 64, 2, 16) if tiny else (8, 1024, 4, 2048)
    model = build(device, torch.bfloat16, experts, top_k, layers=layers, hidden=hidden, moe_token_dispatcher_type="alltoall")
    schema = RouteSchema(experts, top_k, layers, tuple(range(1, layers)))
    batch = inputs(device, rows, tokens)
    recorder = Recorder(model)
    run(model, batch)
    own = recorder.take(rows, tokens, schema)
    recorder.detach()
    routes = {name: local_routes(schema, batch[0], own, absent) for name, absent in (("replay", 0.0), ("replay, 10 % absent", 0.1))}
    # The last token of each sequence has no row. With one, every row is valid and the live top-k is left out.
    every = np.ascontiguousarray(own.transpose(2, 1, 0, 3).reshape(schema.num_moe_layers, -1, top_k)).astype(schema.id_dtype)
    whole = LocalRoutes(every, np.ones_like(routes["replay"].valid), routes["replay"].reasons)
    replay = attach([model], schema)

    def once(given: LocalRoutes | None) -> None:
        with replay.step():
            if given is not None:
                replay.load(model, given)
            model.zero_grad(set_to_none=True)
            model(*batch, labels=batch[0]).float().mean().backward()

    found = paired({"live": None, **routes, "replay, every row valid": whole}, once, device, 4 if tiny else 25)
    replay.detach()
    return {"experts": experts, "top_k": top_k, "layers": layers, "hidden": hidden, "tokens": rows * tokens, **found}


if __name__ == "__main__":
    main()
