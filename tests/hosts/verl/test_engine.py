"""The replaying engine over VERL's own: constructor, micro-batching, packing, forward_step, schedule and loss are the host's; the model is
Megatron-core's with the local layer spec (see support/local_spec_engine.py). What the routers emitted is read by a hook that knows nothing
of replay, and compared token by token."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.local_spec_engine import build_engine
from support.verl_batches import SCHEMA, data_proto, engine_batch, random_ids, sample

from verl_r3_plugin.cli.demo.megatron_cpu import record_routing_maps
from verl_r3_plugin.errors import ReplayError
from verl_r3_plugin.field import FIELD, pack
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema

pytestmark = [pytest.mark.verl, pytest.mark.megatron]


@pytest.fixture(scope="module", autouse=True)
def on():
    torch.set_num_threads(1)
    from verl_r3_plugin.hosts.verl import activation

    activation.switch_off()
    activation.decide({"actor": {"strategy": "megatron", "megatron": {"router_replay": {"mode": "R3"}}}})
    yield
    activation.switch_off()


@pytest.fixture(scope="module")
def engine(on):
    return build_engine()


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    return [sample(rng, 5, 7), sample(rng, 9, 3), sample(rng, 4, 11), sample(rng, 6, 6)]


def settings(monkeypatch, **changes):
    """The process's settings with `changes`."""
    import dataclasses

    from verl_r3_plugin.hosts.verl.activation import state

    monkeypatch.setattr(state, "settings", dataclasses.replace(state.settings, **changes))


def infer(engine, samples, *, field=True, replay=True, **options):
    """(log-probs of each sequence, routing maps {layer: [a micro-batch's [tokens, experts]]}) of the host's infer_batch."""
    batch = engine_batch(data_proto(samples, field=field), replay=replay, **options)
    with engine.eval_mode(), record_routing_maps(engine.module) as maps:
        output = engine.infer_batch(batch)
    return [row.clone() for row in output["model_output"]["log_probs"].unbind()], maps


def loss_function():
    from verl.workers.config import McoreActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = McoreActorConfig(strategy="megatron", rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2)
    return partial(ppo_loss, config=config)


def train(engine, samples, **options):
    """(gradients, metrics, routing maps) of the host's forward and backward, without a step of the optimizer."""
    batch = engine_batch(data_proto(samples), compute_loss=True, **options)
    with engine.train_mode(), record_routing_maps(engine.module) as maps:
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch, loss_function(), forward_only=False)
        grads = {n: p.grad.clone() for n, p in engine.module[0].named_parameters() if p.grad is not None}
    return grads, output["metrics"], maps


def emitted(maps, order, lengths):
    """{sample: bool [tokens, moe_layers, experts]} from the maps of micro-batches that hold the samples of `order`, laid end to end."""
    layers = torch.stack([torch.cat(maps[layer]) for layer in SCHEMA.moe_layers], 1).numpy()
    bounds = np.cumsum([0] + [lengths[i] for i in order])
    assert len(layers) == bounds[-1]
    return {i: layers[start:stop] for i, start, stop in zip(order, bounds[:-1], bounds[1:], strict=True)}


def as_map(routes):
    """bool [tokens, moe_layers, experts] of captured routes."""
    wanted = np.zeros((*routes.ids.shape[:2], routes.schema.num_experts), bool)
    np.put_along_axis(wanted, routes.ids.astype(np.int64), True, axis=2)
    return wanted


def lengths(samples):
    return [len(s.token_ids) for s in samples]


def assert_replayed(samples, maps, live=None, order=None):
    """Every present row was used as captured, by set; every other row is the live router's where `live` maps are given."""
    order = list(range(len(samples))) if order is None else order
    found = emitted(maps, order, lengths(samples))
    native = emitted(live, list(range(len(samples))), lengths(samples)) if live else None
    for i, s in enumerate(samples):
        present = s.routes.present
        np.testing.assert_array_equal(found[i][present], as_map(s.routes)[present])
        if native is not None:
            # The first MoE layer sees the same input either way; later ones see what replay made of it.
            np.testing.assert_array_equal(found[i][~present][:, 0], native[i][~present][:, 0])


def test_infer_replays_every_captured_row_and_routes_the_last_token_live(engine, samples):
    _, live = infer(engine, samples, replay=False)
    _, maps = infer(engine, samples)
    assert_replayed(samples, maps, live)
    with pytest.raises(AssertionError):  # the comparison notices when nothing is replayed
        assert_replayed(samples, live)


def test_rows_of_the_wrong_token_or_layer_would_be_noticed(engine, samples):
    """Negative controls of the comparison: routes shifted by one row, and two layers swapped."""
    _, maps = infer(engine, samples)
    for damage in (lambda ids: np.roll(ids, 1, 0), lambda ids: ids[:, [1, 0, 2]]):
        wrong = [SimpleNamespace(**{**vars(s), "token_ids": s.token_ids}) for s in samples]
        wrong[0].routes = RoutedExperts(SCHEMA, np.ascontiguousarray(damage(samples[0].routes.ids)), samples[0].routes.present)
        with pytest.raises(AssertionError):
            assert_replayed(wrong, maps)


def test_without_replay_the_numbers_are_the_hosts_own_bit_for_bit(engine, samples):
    """The reference policy, and the proof that VERL's router patch was never applied."""
    from megatron.core.transformer.moe.router import TopKRouter
    from verl.utils.megatron.router_replay_patch import RouterReplay

    mine, _ = infer(engine, samples, replay=False)
    host = build_engine(mode="disabled", replaying=False)
    host.module[0].load_state_dict(engine.module[0].state_dict())
    theirs, _ = infer(host, samples, field=False, replay=False)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert TopKRouter.routing.__module__ == "megatron.core.transformer.moe.router"
    assert RouterReplay.router_instances == [] and not engine.enable_routing_replay
    assert engine.engine_config.router_replay.mode == "R3", "the worker's configuration is not rewritten"


def test_an_engine_built_without_r3_passes_everything_through(samples):
    engine = build_engine(mode="disabled")
    host = build_engine(mode="disabled", replaying=False)
    mine, _ = infer(engine, samples, replay=True)
    theirs, _ = infer(host, samples, field=False, replay=False)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_the_reference_model_is_built_without_the_hosts_patch_and_is_not_replayed(samples):
    engine = build_engine(forward_only=True)
    assert engine._r3 is None and not engine.enable_routing_replay
    _, live = infer(engine, samples, replay=False)
    with pytest.raises(AssertionError):
        assert_replayed(samples, live)


def test_a_lora_reference_goes_through_compute_log_prob_and_is_not_replayed(engine, samples):
    engine.peft_cls = SimpleNamespace(disable_adapter=lambda module: nullcontext())
    try:
        live, _ = infer(engine, samples, replay=False)
        with engine.disable_adapter():
            reference, _maps = infer(engine, samples, replay=True)
        policy, _ = infer(engine, samples, replay=True)
    finally:
        engine.peft_cls = None
    assert all(torch.equal(a, b) for a, b in zip(live, reference, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(live, policy, strict=True))


def test_update_replays_and_reports_sums_that_the_trainer_can_divide(engine, samples):
    from verl_r3_plugin.hosts.verl.step import SUM_PREFIX, finish

    grads, metrics, maps = train(engine, samples)
    assert_replayed(samples, maps)
    assert grads["decoder.layers.2.mlp.router.weight"].abs().sum() > 0
    sums = {k.removeprefix(SUM_PREFIX): v.aggregate() for k, v in metrics.items() if k.startswith(SUM_PREFIX)}
    shares = finish(sums)
    assert shares["r3/coverage"] == 1.0 and shares["r3/fallback"] == 0.0
    assert 0.0 < shares["r3/agreement"] < 0.6, "random routes agree with a router by chance only"
    assert sums["trained"] == sum(len(s.response) for s in samples)
    assert shares["r3/bytes_per_token"] > 0 and shares["r3/host_bytes_per_token"] == 4 * 4
    assert {"r3/logprob_abs_diff", "r3/k3_kl", "r3/extreme_fraction"} <= set(shares)


def test_the_reported_log_prob_mismatch_is_that_of_trained_tokens(engine, samples):
    from verl_r3_plugin.hosts.verl.step import SUM_PREFIX, finish

    samples[0].mask[2:4] = 0  # a tool's tokens
    proto = data_proto(samples)
    _, metrics, _ = train(engine, samples)
    shares = finish({k.removeprefix(SUM_PREFIX): v.aggregate() for k, v in metrics.items() if k.startswith(SUM_PREFIX)})
    wanted = proto.batch["response_mask"].bool()
    difference = (proto.batch["old_log_probs"] - proto.batch["rollout_log_probs"])[wanted]
    assert shares["r3/logprob_abs_diff"] == pytest.approx(difference.abs().mean().item(), rel=1e-5)


@pytest.mark.parametrize("granularity", [{"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}])
def test_recompute_uses_the_routes_of_its_forward_pass(engine, granularity):
    rng = np.random.default_rng(3)
    samples = [sample(rng, 5, 7, missing=[1, 6]), sample(rng, 9, 3), sample(rng, 4, 11, missing=None), sample(rng, 6, 6)]
    again = build_engine(options=granularity)
    again.module[0].load_state_dict(engine.module[0].state_dict())
    plain, _, _ = train(engine, samples)
    recomputed, _, maps = train(again, samples)
    assert len(maps[0]) == 4, "two micro-batches, each run twice"
    for first, second in zip(maps[2][0::2], maps[2][1::2], strict=True):
        assert torch.equal(first, second)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=0, atol=1e-6)


def test_rows_that_were_not_captured_are_routed_live_and_counted(engine):
    from verl_r3_plugin.hosts.verl.step import SUM_PREFIX

    rng = np.random.default_rng(1)
    samples = [sample(rng, 5, 7, missing=[3, 6, 8]), sample(rng, 9, 3, missing=None), sample(rng, 4, 11), sample(rng, 6, 6)]
    _, live = infer(engine, samples, replay=False)
    _, maps = infer(engine, samples)
    assert_replayed(samples, maps, live)
    _, metrics, _ = train(engine, samples)
    sums = {k.removeprefix(SUM_PREFIX): v.aggregate() for k, v in metrics.items() if k.startswith(SUM_PREFIX)}
    # Rows 6 and 8 of the first predict response tokens (7 and 9 of 12); row 3 predicts a prompt token. The second has 3 response tokens.
    assert sums["fell_back"] == 2 + 3


def test_a_cloned_padding_row_is_noticed_and_never_replayed(engine, samples):
    """VERL pads a batch by cloning a row with its field and writing other tokens into it."""
    clone = sample(np.random.default_rng(9), 5, 7, missing=None)
    clone.blob = samples[0].blob  # same length, other tokens
    batch = [samples[0], clone, samples[2], samples[3]]
    _, live = infer(engine, batch, replay=False)
    _, maps = infer(engine, batch)
    assert_replayed(batch, maps, live)


def test_dynamic_batch_size_reorders_samples_and_each_keeps_its_rows(engine):
    rng = np.random.default_rng(2)
    samples = [sample(rng, 3 + i, 20 - 3 * i) for i in range(6)]
    _, maps = infer(engine, samples, use_dynamic_bsz=True, max_token_len_per_gpu=48)
    # Which samples the host put together: by their length, which is unique here up to equal sums; found by trying their routes.
    widths = [len(m) for m in maps[0]]
    assert len(widths) > 1
    everything = torch.stack([torch.cat(maps[layer]) for layer in SCHEMA.moe_layers], 1).numpy()
    for s in samples:
        wanted, present = as_map(s.routes), s.routes.present
        width = len(s.token_ids)
        hits = [
            start
            for start in range(len(everything) - width + 1)
            if np.array_equal(everything[start : start + width][present], wanted[present])
        ]
        assert len(hits) == 1


def test_padded_batches_are_replayed_too(samples):
    engine = build_engine(use_remove_padding=False)
    batch = engine_batch(data_proto(samples), use_remove_padding=False)
    with engine.eval_mode(), record_routing_maps(engine.module) as maps:
        engine.infer_batch(batch)
    for micro, pair in enumerate((samples[:2], samples[2:])):
        width = len(maps[0][micro]) // 2  # 0.9 pads every micro-batch to the longest sequence of the mini-batch
        layers = torch.stack([maps[layer][micro] for layer in SCHEMA.moe_layers], 1).numpy().reshape(width, 2, 3, 16)
        for column, s in enumerate(pair):
            present = s.routes.present
            np.testing.assert_array_equal(layers[: len(s.token_ids), column][present], as_map(s.routes)[present])


@pytest.mark.parametrize(("experts", "top_k"), [(300, 6), (600, 10)])
def test_ids_above_255_and_511_survive(on, experts, top_k):
    schema = RouteSchema(experts, top_k, 2, (0, 1))
    model = {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": 2,
        "mlp_only_layers": [],
        "moe_intermediate_size": 2,
    }
    engine = build_engine(model=model)
    rng = np.random.default_rng(5)
    samples = [sample(rng, 4, 6, schema=schema), sample(rng, 3, 5, schema=schema)]
    assert max(s.routes.ids.max() for s in samples) > (511 if experts > 512 else 255)
    batch = engine_batch(data_proto(samples))
    with engine.eval_mode(), record_routing_maps(engine.module) as maps:
        engine.infer_batch(batch)
    found = torch.stack([maps[0][0], maps[1][0]], 1).numpy()
    wanted = np.concatenate([as_map(s.routes) for s in samples])
    present = np.concatenate([s.routes.present for s in samples])
    np.testing.assert_array_equal(found[present], wanted[present])


def test_an_exception_in_a_step_leaves_nothing_behind(engine, samples):
    live, _ = infer(engine, samples, replay=False)

    def broken(*_args, **_kwargs):
        raise RuntimeError("the loss failed")

    batch = engine_batch(data_proto(samples), compute_loss=True)
    with engine.train_mode(), pytest.raises(RuntimeError, match="the loss failed"):
        engine.forward_backward_batch(batch, broken, forward_only=False)
    assert engine._r3_step is None
    for module in engine.module[0].modules():
        if hasattr(module, "router_replay") and module.router_replay is not None:
            assert module.router_replay._ids is None and module.router_replay.frozen_passes == 0
    after, _ = infer(engine, samples, replay=False)
    assert all(torch.equal(a, b) for a, b in zip(live, after, strict=True))


def test_above_max_fallback_the_step_is_refused_with_the_rollouts_named(engine, samples, monkeypatch):
    settings(monkeypatch, max_fallback=0.1)
    samples[2].blob = None
    with pytest.raises(ReplayError, match=r"at most 10\.0%.*found 40\.7%.*rollout u2 \(row 2\): 11 of 11 tokens.*max_fallback"):
        infer(engine, samples)
    settings(monkeypatch, max_fallback=0.5)
    infer(engine, samples)


def test_a_first_step_without_a_single_row_is_refused(samples):
    engine = build_engine()
    for s in samples:
        s.blob = None
    with pytest.raises(ReplayError, match="found not one row"):
        infer(engine, samples)


def test_a_batch_without_the_field_is_refused(engine, samples):
    with pytest.raises(ReplayError, match=FIELD):
        infer(engine, samples, field=False)


def test_the_callers_batch_keeps_its_field_and_gets_nothing_new(engine, samples):
    batch = engine_batch(data_proto(samples))
    before = set(batch.keys())
    with engine.eval_mode():
        engine.infer_batch(batch)
    assert before <= set(batch.keys()) and "r3_row" not in batch.keys()  # noqa: SIM118 (a TensorDict)


def test_damaged_bytes_are_an_error_and_nothing_is_half_replayed(engine, samples):
    from verl_r3_plugin.errors import CodecError

    damaged = bytearray(samples[1].blob)
    damaged[-9] ^= 1
    samples[1].blob = bytes(damaged)
    with pytest.raises(CodecError):
        infer(engine, samples)
    assert engine._r3_step is None


def test_routes_of_another_model_are_refused(engine, samples):
    from verl_r3_plugin.errors import CodecError

    other = RouteSchema(16, 4, 5, (0, 2, 3))
    routes = RoutedExperts(other, random_ids(np.random.default_rng(0), other, 12), samples[0].routes.present)
    from verl_r3_plugin.trajectory import Trajectory

    none = np.full(12, -1)
    samples[0].blob = pack(Trajectory(samples[0].token_ids, routes, none.astype(np.int32), none))
    with pytest.raises(CodecError):
        infer(engine, samples)
