"""One rank of a real Megatron-core job under gloo: run as a script by every rank of a group, with a JSON list of cases.

Each case builds a model twice from the same weights: once live, without replay and without recompute, with a recorder at each router;
once with replay attached. The routes travel as envelopes through `LocalRoutes.gather`. Which token a router's row holds is not taken
from the slicing under test: the embedding has a known row for each token and all token ids of a micro-batch differ, so each row of
the embedding's output names its token. One JSON object with all cases goes to RESULTS/<rank>.json.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_r3_plugin.cli.demo import megatron_cpu

VOCAB, SEQ, BATCH, HIDDEN = 64, 16, 2, 32
LAYOUT = ("tp", "pp", "ep", "vpp", "cp")


class Norm(torch.nn.LayerNorm):
    """Megatron's torch norm refuses sequence parallelism, and its others need TransformerEngine or Apex."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class LocalAttention(torch.nn.Module):
    """Attends within this rank's tokens: Megatron's own attention without TransformerEngine refuses context parallelism."""

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, query, key, value, *_, **__):
        parts = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)


class Recorder:
    """Lets the router choose, and keeps what it chose in its own order (descending score)."""

    def __init__(self):
        self.chosen: list[torch.Tensor] = []

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.chosen.append(indices.clone())
        return values, indices


def config(case: dict[str, Any], **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = dict(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=16,
        ffn_hidden_size=64,
        moe_layer_freq=[0, 1, 1, 1],
        moe_router_pre_softmax=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=case.get("tp", 1),
        sequence_parallel=case.get("tp", 1) > 1,
        pipeline_model_parallel_size=case.get("pp", 1),
        virtual_pipeline_model_parallel_size=case.get("vpp"),
        expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=1,
        context_parallel_size=case.get("cp", 1),
    )
    known = inspect.signature(TransformerConfig).parameters
    options = {**values, **megatron_cpu.CPU_OPTIONS, **case.get("options", {}), **more}
    return TransformerConfig(**{name: value for name, value in options.items() if name in known})


def build(case: dict[str, Any], settings: Any) -> list[torch.nn.Module]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    chunks, stages = [], case.get("vpp") or 1
    pipeline = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()
    for stage in range(stages):
        first, last = pipeline[1] == 0 and stage == 0, pipeline[1] == pipeline[0] - 1 and stage == stages - 1
        virtual = {"vp_stage": stage} if stages > 1 else {}
        if stages > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, **virtual)
        spec.layer_norm = Norm
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
            if settings.context_parallel_size > 1:
                layer.submodules.self_attention.submodules.core_attention = LocalAttention
        chunk = GPTModel(
            settings,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=SEQ,
            position_embedding_type="rope",
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=False,
            parallel_output=True,
            **virtual,
        )
        if first:
            weight = chunk.embedding.word_embeddings.weight
            start = parallel_state.get_tensor_model_parallel_rank() * len(weight)
            with torch.no_grad():
                weight.copy_(table()[start : start + len(weight)])
        chunks.append(chunk.train())
    return chunks


def table() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))


def batches(case: dict[str, Any], replica: int) -> list[torch.Tensor]:
    """Token ids [BATCH, SEQ] of each micro-batch, all different within one."""
    generator = torch.Generator().manual_seed(100 + replica)
    return [torch.randperm(VOCAB, generator=generator)[: BATCH * SEQ].view(BATCH, SEQ) for _ in range(case.get("micro_batches", 4))]


def positions(case: dict[str, Any], rank: int) -> np.ndarray:
    """Positions of each sequence that this context-parallel rank holds."""
    size = case.get("cp", 1)
    if size == 1 or case.get("order") == "contiguous":
        return np.arange(SEQ).reshape(size, -1)[rank]
    pieces = np.arange(SEQ).reshape(2 * size, -1)
    return np.concatenate([pieces[rank], pieces[2 * size - 1 - rank]])


def rows_of_rank(case: dict[str, Any]) -> np.ndarray:
    """The slicing under test: number of each local token among the sequences laid end to end. `wrong` breaks it on purpose."""
    from megatron.core import parallel_state

    held = positions(case, parallel_state.get_context_parallel_rank())
    rows = held[:, None] + np.arange(BATCH)[None] * SEQ  # sequence first
    if case.get("wrong") == "batch first":
        rows = rows.T
    rows = rows.reshape(-1)
    parts = parallel_state.get_tensor_model_parallel_world_size()
    rows = rows.reshape(parts, -1)[parallel_state.get_tensor_model_parallel_rank()]
    if case.get("wrong") == "off by one row":
        rows = (rows + 1) % (BATCH * SEQ)
    return rows


class Run:
    """One forward-backward call through Megatron's own schedule; keeps losses, gradients, routing maps and each row's token."""

    def __init__(self, case, chunks, data, load=None):
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.moe.router import TopKRouter

        self.losses, self.embedded = [], []
        self.maps: dict[int, list[torch.Tensor]] = {}
        self.again: dict[int, list[torch.Tensor]] = {}
        handles = []
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
            if chunk.pre_process:
                handles.append(chunk.embedding.register_forward_hook(lambda _m, _i, out: self.embedded.append(out.detach().flatten(0, 1))))
            for router in chunk.decoder.modules():
                if isinstance(router, TopKRouter):
                    handles.append(router.register_forward_hook(self._keep))
        held = torch.from_numpy(positions(case, parallel_state.get_context_parallel_rank()))
        place = held.expand(BATCH, -1)
        mask = torch.ones(len(held), len(held), dtype=torch.bool).triu(1)[None, None]

        def forward_step(iterator, chunk, *_):
            index = next(iterator)
            if load is not None:
                load(chunk, index)
            tokens = data[index][:, held]
            out = chunk(tokens, place, mask, labels=(tokens * 3 + 1) % VOCAB)

            def loss(output):
                self.losses.append(output.detach().clone())
                return output.mean(), {}

            return out, loss

        count = len(data)
        iterators = [iter(range(count)) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=count,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        for handle in handles:
            handle.remove()
        self.grads = {f"{i}.{name}": p.grad.clone() for i, c in enumerate(chunks) for name, p in c.named_parameters() if p.grad is not None}

    def _keep(self, router, _inputs, output):
        into = self.again if torch._C._current_graph_task_id() != -1 else self.maps
        into.setdefault(router.layer_number - 1, []).append(output[1].detach().bool().clone())


def equal(one: Run, other: Run) -> bool:
    same = len(one.losses) == len(other.losses) and all(map(torch.equal, one.losses, other.losses))
    return same and set(one.grads) == set(other.grads) and all(torch.equal(one.grads[key], other.grads[key]) for key in one.grads)


def difference(one: Run, other: Run) -> float:
    return max((one.grads[key] - other.grads[key]).abs().max().item() for key in one.grads)


def tokens_of_rows(case, run: Run, data) -> list[np.ndarray] | None:
    """Number of the token in each row of the embedding's output, per micro-batch; None where this rank has no embedding."""
    if not run.embedded:
        return None
    found = []
    for output, ids in zip(run.embedded, data, strict=True):
        same = (output[:, None] == table()[None]).all(2)
        assert (same.sum(1) == 1).all(), "every row of the embedding's output is one token's"
        number = {int(token): i for i, token in enumerate(ids.flatten())}
        found.append(np.array([number[int(token)] for token in same.int().argmax(1)]))
    return found


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter

    from verl_r3_plugin import codec
    from verl_r3_plugin.hosts.megatron import attach
    from verl_r3_plugin.replay.local import LocalRoutes
    from verl_r3_plugin.routes import RoutedExperts
    from verl_r3_plugin.schema import RouteSchema

    sizes = {name: case[name] for name in LAYOUT if name in case}
    megatron_cpu.initialise(**sizes)
    plain = config(case, recompute_granularity=None, recompute_method=None, recompute_num_layers=None)
    settings = config(case)
    frequency = plain.moe_layer_freq
    moe = tuple(layer for layer in range(plain.num_layers) if frequency[layer])
    schema = RouteSchema(plain.num_moe_experts, plain.moe_router_topk, plain.num_layers, moe)
    replica = parallel_state.get_data_parallel_rank()
    data = batches(case, replica)
    reference = build(case, plain)
    recorders = {
        router.layer_number - 1: router for chunk in reference for router in chunk.decoder.modules() if isinstance(router, TopKRouter)
    }
    for router in recorders.values():
        if case.get("bias"):
            router.expert_bias.copy_(torch.linspace(-0.3, 0.3, schema.num_experts))
        router.router_replay = Recorder()
    live = Run(case, reference, data)
    tags = tokens_of_rows(case, live, data)
    mine = tags if parallel_state.get_pipeline_model_parallel_rank() == 0 else None
    # Later stages see the rows of the first stage of their own pipeline.
    world = torch.distributed.get_world_size()
    place = (replica, parallel_state.get_context_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    recorded = {layer: [ids.numpy() for ids in router.router_replay.chosen] for layer, router in recorders.items()}
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, (place, mine, recorded))
    where = {place: tags for place, tags, _ in everyone if tags is not None}
    own = np.zeros((len(data), BATCH * SEQ, schema.num_moe_layers, schema.top_k), schema.id_dtype)
    for (their_replica, context, tensor), _, layers in everyone:
        if their_replica == replica:
            for layer, passes in layers.items():
                for index, ids in enumerate(passes):
                    own[index, where[their_replica, context, tensor][index], schema.moe_layers.index(layer)] = ids
    random = np.random.default_rng(5 + replica)
    given = random.random((len(data), BATCH * SEQ, schema.num_moe_layers, schema.num_experts)).argsort(3)[..., : schema.top_k]
    given = given.astype(schema.id_dtype)

    model = build(case, settings)
    for mine_, theirs in zip(model, reference, strict=True):
        mine_.load_state_dict(theirs.state_dict())
    untouched = [router.router_replay for router in recorders.values()]
    session = attach(model, schema)
    rows = rows_of_rank(case)

    def loader(routes, encoding, present):
        blobs = []
        for index, ids in enumerate(data):
            spans = [slice(b * SEQ, (b + 1) * SEQ) for b in range(BATCH)]
            blobs.append([])
            for b, span in enumerate(spans):
                one = RoutedExperts(schema, np.where(present[span, None, None], routes[index, span], 0), present[span])
                hashed = codec.token_hash(ids[b].numpy())
                blobs[-1].append(codec.encode(one, token_count=SEQ, token_hash=hashed, encoding=encoding))

        def load(chunk, index):
            tokens = [sequence.numpy() for sequence in data[index]]
            source = len(data) - 1 - index if case.get("wrong") == "micro-batches swapped" else index
            if source != index:
                tokens = [sequence.numpy() for sequence in data[source]]
            layers = session.layers(chunk)
            local = LocalRoutes.gather(blobs[source], tokens, rows, layers, schema)
            if case.get("wrong") == "dense layers counted":
                whole = LocalRoutes.gather(blobs[source], tokens, rows, range(schema.num_moe_layers), schema)
                local = LocalRoutes(whole.ids[[(o + 1) % schema.num_moe_layers for o in layers]], whole.valid, whole.reasons)
            session.load(chunk, local)

        return load

    every = np.ones(BATCH * SEQ, np.bool_)
    some = random.random(BATCH * SEQ) < 0.7
    with session.step(statistics=True):
        again = Run(case, model, data, loader(own, "raw", every))
    sums = session.statistics()
    result: dict[str, Any] = {"own": equal(live, again), "difference": difference(live, again)}
    result["agreement"] = sums["agreed"] / sums["compared"] if sums["compared"] else 1.0
    with session.step():
        forced = Run(case, model, data, loader(given, "set", some))
        waiting = sum(layer.frozen_passes for _, layer, _ in session._all())
    after = Run(case, model, data) if case.get("then_live", True) else None

    def exact(maps):
        good = True
        for layer, passes in maps.items():
            for index, emitted in enumerate(passes):
                tokens = where[place][index]
                wanted = given[index, tokens, schema.moe_layers.index(layer)].astype(np.int64)
                expected = torch.zeros_like(emitted).scatter(1, torch.from_numpy(wanted), True)
                good &= torch.equal(emitted[some[tokens]], expected[some[tokens]])
                if schema.moe_layers.index(layer) == 0 and not case.get("bias"):
                    # The first MoE layer's input does not depend on any routing, so absent rows choose there as the live model did.
                    good &= torch.equal(emitted[~some[tokens]], live.maps[layer][index][~some[tokens]])
        return bool(good) and all(len(passes) == len(data) for passes in maps.values())

    result["given"] = exact(forced.maps) and len(forced.maps) == len(recorders)
    result["recomputed"] = {str(layer): len(passes) for layer, passes in forced.again.items()}
    result["again_equal"] = all(
        torch.equal(a, b) for layer in forced.again for a, b in zip(forced.maps[layer], forced.again[layer], strict=True)
    )
    result["waiting"] = waiting
    result["cleared"] = after is None or equal(live, after) or bool(forced.again)
    result["moe_layers"] = sorted(recorders)
    session.detach()
    result["other_model_untouched"] = [r.router_replay for r in recorders.values()] == untouched
    if settings.recompute_granularity:
        # The same routes without recompute: bit-equal gradients.
        other = build(case, plain)
        for mine_, theirs in zip(other, reference, strict=True):
            mine_.load_state_dict(theirs.state_dict())
        session = attach(other, schema)
        with session.step():
            stored = Run(case, other, data, loader(given, "set", some))
        result["recompute_equal"] = equal(stored, forced)
    return result


def main() -> None:
    cases, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    out = {}
    for case in cases:
        try:
            out[case["name"]] = run_case(case)
        except Exception:
            out[case["name"]] = {"error": traceback.format_exc()}
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                break  # the other ranks are no longer in step
    import megatron.core

    out["version"] = megatron.core.__version__
    (results / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(out))
    os._exit(0)


if __name__ == "__main__":
    main()
