"""What is refused before training, and what a session leaves behind: nothing."""

from __future__ import annotations

import gc
import types
import weakref

import numpy as np
import pytest

pytestmark = pytest.mark.megatron

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from verl_r3_plugin.errors import ConfigError, HostError, ReplayError, SchemaError
from verl_r3_plugin.hosts import megatron
from verl_r3_plugin.replay.local import LocalRoutes
from verl_r3_plugin.schema import RouteSchema

SCHEMA = RouteSchema(8, 2, 4, (1, 2, 3))


def settings(**changes):
    values = dict(moe_router_fusion=False, moe_router_load_balancing_type="none", num_moe_experts=8, moe_router_topk=2)
    return types.SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (dict(moe_router_fusion=True), "moe_router_fusion"),
        (dict(moe_router_load_balancing_type="sinkhorn"), "moe_router_load_balancing_type"),
        (dict(moe_router_load_balancing_type=["aux_loss", "quantile_balancing"]), "moe_router_load_balancing_type"),
        (dict(moe_n_hash_layers=2), "moe_n_hash_layers"),
        (dict(cuda_graph_impl="local", cuda_graph_modules=["attn", "moe_router"]), "cuda_graph_modules"),
        (dict(cuda_graph_impl="transformer_engine", cuda_graph_scope="full"), "cuda_graph_scope"),
        (dict(cuda_graph_impl="local"), "cuda_graph_impl"),
        (dict(external_cuda_graph=True), "external_cuda_graph"),
        (dict(num_moe_experts=16), "num_moe_experts"),
        (dict(moe_router_topk=4), "num_moe_experts"),
    ],
)
def test_a_setting_that_bypasses_replay_is_refused_by_its_key(changes, key):
    (problem,) = megatron.check_config(settings(**changes), SCHEMA)
    assert problem.severity == "error" and problem.key.endswith("." + key)


def test_graphs_without_the_router_and_plain_settings_are_accepted():
    assert megatron.check_config(settings(), SCHEMA) == []
    assert megatron.check_config(settings(cuda_graph_impl="local", cuda_graph_modules=["attn"]), SCHEMA) == []


def test_a_capacity_factor_is_a_warning():
    (problem,) = megatron.check_config(settings(moe_expert_capacity_factor=1.0), SCHEMA)
    assert problem.severity == "warning" and problem.key.endswith("moe_expert_capacity_factor")


def model(**changes):
    from support import replay_layouts

    from verl_r3_plugin.cli.demo import megatron_cpu

    megatron_cpu.initialise()
    case = {"options": changes}
    return replay_layouts.build(case, replay_layouts.config(case))[0]


def routes(rows: int = 32, layers: int = 3) -> LocalRoutes:
    ids = np.random.default_rng(0).random((layers, rows, 8)).argsort(2)[..., :2].astype(np.uint8)
    return LocalRoutes(ids, np.ones(rows, np.bool_), (None,))


def forward(chunk):
    tokens = torch.arange(32).view(2, 16)
    return chunk(tokens, torch.arange(16).expand(2, -1), torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None], labels=tokens)


def test_a_model_that_the_schema_does_not_describe_is_refused():
    with pytest.raises(SchemaError, match="decoder layer 1"):
        megatron.attach([model()], RouteSchema(8, 2, 4, (2, 3)))
    with pytest.raises(SchemaError, match=r"decoder layers \[0\]"):
        megatron.attach([model()], RouteSchema(8, 2, 4, (0, 1, 2, 3)))


def test_attaching_to_a_fused_router_is_refused():
    chunk = model()
    chunk.config.moe_router_fusion = True
    with pytest.raises(ConfigError, match="moe_router_fusion"):
        megatron.attach([chunk], SCHEMA)


def test_a_megatron_without_the_seam_is_refused(monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(moe_utils, "topk_routing_with_score_function", lambda logits, topk: None)
    with pytest.raises(HostError, match="router_replay"):
        megatron.check_seam()


def test_rows_of_another_length_are_refused_and_an_error_clears_the_step():
    chunk = model()
    live = forward(chunk)
    session = megatron.attach([chunk], SCHEMA)
    with pytest.raises(ReplayError, match="31 tokens"), session.step():
        session.load(chunk, routes(31))
        forward(chunk)
    assert torch.equal(forward(chunk), live)


def test_routes_change_the_forward_and_are_gone_after_the_step():
    chunk = model()
    live = forward(chunk)
    session = megatron.attach([chunk], SCHEMA)
    with session.step():
        session.load(chunk, routes())
        assert not torch.equal(forward(chunk), live)
    assert torch.equal(forward(chunk), live)
    session.detach()
    assert torch.equal(forward(chunk), live)


def test_nothing_accumulates_over_steps_and_the_model_is_not_kept_alive():
    chunk = model()
    session = megatron.attach([chunk], SCHEMA)
    for _ in range(3):
        with session.step():
            for _ in range(3):
                session.load(chunk, routes())
                forward(chunk).mean().backward()
                assert all(layer.frozen_passes == 0 for _, layer, _ in session._all())
    gone = weakref.ref(chunk)
    del chunk
    gc.collect()
    assert gone() is None


def test_only_compared_rows_cost_a_top_k():
    """All rows present: no live top-k. One row absent: one a layer."""
    chunk = model()
    session = megatron.attach([chunk], SCHEMA)
    calls = []
    original = torch.topk

    def counted(*arguments, **options):
        calls.append(1)
        return original(*arguments, **options)

    try:
        torch.topk = counted
        for missing, expected in ((0, 0), (1, 3)):
            given = routes()
            given.valid[:missing] = False
            with session.step():
                session.load(chunk, given)
                calls.clear()
                forward(chunk)
                assert len(calls) == expected
    finally:
        torch.topk = original


def test_routers_of_mtp_layers_are_left_alone():
    """Their layer numbers are also those of decoder layers, since 0.17."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe.router import TopKRouter
    from support import replay_layouts

    from verl_r3_plugin.cli.demo import megatron_cpu

    megatron_cpu.initialise()
    config = replay_layouts.config({}, mtp_num_layers=1)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    chunk = GPTModel(config, spec, vocab_size=64, max_sequence_length=16, position_embedding_type="rope", mtp_block_spec=mtp)
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    decoder = [module for module in chunk.decoder.modules() if isinstance(module, TopKRouter)]
    assert len(routers) == 4 and len(decoder) == 3
    session = megatron.attach([chunk], SCHEMA)
    assert session.layers(chunk) == [0, 1, 2]
    assert [router.router_replay is not None for router in routers] == [router in decoder for router in routers]


def test_a_hybrid_model_is_read_by_its_pattern():
    """HybridModel numbers sublayers: in *E*E the routers are numbers 2 and 4, and MoE layers 0 and 1 of the schema."""
    from megatron.core.transformer.moe.router import TopKRouter

    class Router(TopKRouter):
        def __init__(self, number):
            torch.nn.Module.__init__(self)
            self.layer_number, self.router_replay, self.is_mtp_layer = number, None, False

    class Hybrid(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.hybrid_layer_pattern = settings(), "*E|*E/*E"
            self.decoder = torch.nn.ModuleList([Router(4), Router(2)])

    chunk = Hybrid()
    session = megatron.attach([chunk], RouteSchema(8, 2, 4, (1, 3)))
    assert session.layers(chunk) == [0, 1]
    assert [router.router_replay.name for router in chunk.decoder] == ["MoE layer 3", "MoE layer 1"]
