"""Time of one Megatron router's forward and backward on a CPU: replay against live routing, and against Megatron's own RouterReplay.

    .venv/bin/python benchmarks/replay_cpu.py [--tokens 8192] [--rounds 15]

The variants take turns within every round, so that a busy machine slows all of them; printed are medians and the median of the ratios to
live routing within a round, with the quartiles. Only ratios mean anything: a CPU's top-k is dearer, relative to the rest, than a GPU's.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from verl_r3_plugin.cli.demo import megatron_cpu
from verl_r3_plugin.replay.layer import LayerReplay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    megatron_cpu.initialise()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=chosen.hidden,
        num_attention_heads=4,
        num_moe_experts=chosen.experts,
        moe_router_topk=chosen.top_k,
        moe_ffn_hidden_size=8,
        **megatron_cpu.CPU_OPTIONS,
    )
    block = TransformerBlock(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    router = next(module for module in block.modules() if isinstance(module, TopKRouter)).train()
    tokens = torch.randn(chosen.tokens, 1, chosen.hidden)
    ids = torch.from_numpy(np.random.default_rng(0).random((chosen.tokens, chosen.experts)).argsort(1)[:, : chosen.top_k].astype(np.uint8))
    native = RouterReplay()
    native.set_target_indices(ids.long())
    native.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    layers = {name: LayerReplay(name, chosen.experts, chosen.top_k) for name in ("replay", "some rows absent", "with statistics")}
    some = torch.ones(chosen.tokens, 1, dtype=torch.bool)
    some[::10] = False
    for name, layer in layers.items():
        layer.load(ids, some if name == "some rows absent" else None)
        layer.count(name == "with statistics")
    variants = {"live": None, "Megatron's own": native, **layers}

    def once(replay: object) -> float:
        router.router_replay = replay
        began = time.perf_counter()
        probabilities, _ = router(tokens)
        probabilities.sum().backward()
        return time.perf_counter() - began

    for replay in variants.values():
        once(replay)
    times = {name: [] for name in variants}
    for _ in range(chosen.rounds):
        for name, replay in variants.items():
            times[name].append(once(replay))
    print(f"router forward + backward, {chosen.tokens} tokens, top-{chosen.top_k} of {chosen.experts}, one thread, {chosen.rounds} rounds")
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["live"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:18s} {statistics.median(seconds) * 1e3:8.1f} ms   x{middle:.2f} of live ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
