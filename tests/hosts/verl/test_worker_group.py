"""Real Ray, real ActorRolloutRefWorker, real trainer methods: activation in a worker, the handshake, replay through both calls, metrics.

The model is the local-spec one (support/verl_worker.py). verl 0.9 finds the plugin by its entry point; verl 0.8 by `external_lib`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from support.verl_batches import data_proto, sample, unpadding_without_flash_attention
from support.worker_group import R3_KEYS, checkpoint, compose, start_ray, worker_group

from verl_r3_plugin.errors import HostError
from verl_r3_plugin.hosts.verl import activation, marker

pytestmark = [pytest.mark.verl, pytest.mark.megatron, pytest.mark.slow]


@pytest.fixture(scope="module")
def ray_here():
    import ray

    start_ray("support.verl_worker")
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    keys = [*R3_KEYS, "+actor_rollout_ref.rollout.custom.r3.max_fallback=0.9"]
    if marker.needed():
        keys.append("actor_rollout_ref.model.external_lib=verl_r3_plugin")
    return compose(checkpoint(tmp_path_factory.mktemp("model")), *keys)


@pytest.fixture(scope="module")
def group(ray_here, config):
    return worker_group(config)


@pytest.fixture
def trainer(config, group):
    """The real v0 trainer's methods on a real worker group; its constructor wants datasets and GPUs."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    activation.switch_off()
    unpadding_without_flash_attention()
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config, trainer.actor_rollout_wg = config, group
    trainer.ref_in_actor, trainer.use_teacher_policy, trainer.distillation_config = False, False, None
    yield trainer
    activation.switch_off()


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    samples = [sample(rng, 5, 7), sample(rng, 9, 3), sample(rng, 4, 11, missing=[2, 8]), sample(rng, 6, 6, missing=None)]
    proto = data_proto(samples)
    proto.meta_info["global_token_num"] = [12, 12, 15, 12]
    return proto


def reports(group):
    from verl_r3_plugin.hosts.verl.handshake import ask

    return ask(group.workers)


def test_the_worker_built_the_replaying_engine_before_anybody_asked(group):
    (report,) = reports(group)
    assert report["status"] == "on" and report["parts"] == ["engine"] and report["problems"] == []
    assert report["engines"] == ["R3LocalSpecEngine: replay of 3 MoE layers"]


def test_a_trainer_step_replays_and_puts_r3_among_verls_metrics(trainer, batch):
    from verl.trainer.ppo.ray_trainer import reduce_metrics

    assert activation.state.status == "armed"
    old, _ = trainer._compute_old_log_prob(batch)
    assert activation.state.status == "on", "the trainer's own configuration switched its process on"
    assert old.batch["old_log_probs"].shape == batch.batch["responses"].shape
    metrics = reduce_metrics(trainer._update_actor(batch).meta_info["metrics"])
    ours = {key: value for key, value in metrics.items() if "r3" in key}
    assert set(ours) == {
        "r3/coverage",
        "r3/fallback",
        "r3/agreement",
        "r3/logprob_abs_diff",
        "r3/k3_kl",
        "r3/extreme_fraction",
        "r3/bytes_per_token",
        "r3/host_bytes_per_token",
    }
    # Of 47 rows (each sequence's tokens but the last) 11 have no routes and 2 were dropped; of 27 trained tokens 6 + 1 fell back.
    assert ours["r3/coverage"] == pytest.approx(34 / 47) and ours["r3/fallback"] == pytest.approx(7 / 27)
    assert ours["r3/host_bytes_per_token"] == 16 and "actor/grad_norm" in metrics


def test_the_first_update_weights_change_and_the_next_step_still_replays(trainer, batch):
    first, _ = trainer._compute_old_log_prob(batch)
    trainer._update_actor(batch)
    second, _ = trainer._compute_old_log_prob(batch)
    assert not (first.batch["old_log_probs"] == second.batch["old_log_probs"]).all()


def test_the_handshake_names_the_worker_where_the_plugin_is_missing(ray_here, trainer, batch):
    @ray_here.remote
    class Bare:
        """A worker on a node where the package is not loaded."""

    trainer.actor_rollout_wg = SimpleNamespace(workers=[*trainer.actor_rollout_wg.workers, Bare.remote()])
    with pytest.raises(HostError, match="actor worker 1: the plugin is not loaded") as refused:
        trainer._update_actor(batch)
    assert "actor worker 0" not in str(refused.value) and "external_lib" in str(refused.value)


def test_the_handshake_names_a_worker_whose_engine_is_the_hosts_own(ray_here, trainer, batch):
    @ray_here.remote
    class On:
        def __init__(self):
            from verl_r3_plugin.hosts.verl import activation

            activation.decide({"actor": {"strategy": "megatron", "megatron": {"router_replay": {"mode": "R3"}}}})

    @ray_here.remote
    class Off:
        def __init__(self):
            from verl_r3_plugin.hosts.verl import activation

            activation.decide({"actor": {"strategy": "fsdp"}})

    trainer.actor_rollout_wg = SimpleNamespace(workers=[On.remote(), Off.remote()])
    with pytest.raises(HostError) as refused:
        trainer._update_actor(batch)
    assert "actor worker 0: the plugin is on, but the engine there is not its own" in str(refused.value)
    assert "actor worker 1: the plugin is loaded but off" in str(refused.value)


def test_asking_does_not_load_the_plugin_where_it_is_not(ray_here):
    from verl_r3_plugin.hosts.verl.handshake import ask

    @ray_here.remote
    class Bare:
        def modules(self):
            import sys

            return [name for name in sys.modules if name.startswith("verl_r3_plugin")]

    bare = Bare.remote()
    assert ask([bare]) == [None]
    assert ray_here.get(bare.modules.remote()) == []


def test_an_agent_loop_worker_decides_when_it_is_asked(ray_here, config):
    """verl 0.8 arms an agent-loop worker in the middle of its constructor; the handshake is its occasion to read its configuration."""
    from verl_r3_plugin.hosts.verl.handshake import ask

    @ray_here.remote
    class Loop:
        def __init__(self, config):
            import verl_r3_plugin  # noqa: F401 (arms, as external_lib does)

            self.config = config

    (answer,) = ask([Loop.remote(config)])
    assert answer["status"] == "on"


def test_the_marker_that_reaches_a_trainer_without_plugin_group_arms_it():
    import pickle
    import subprocess
    import sys

    code = "import pickle, sys; pickle.load(sys.stdin.buffer); from verl_r3_plugin.hosts.verl import activation as a; print(a.state.status)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(marker.Loaded()), capture_output=True, timeout=120)
    assert done.stdout.decode().strip() == "armed", done.stderr.decode()[-500:]


def test_a_v1_trainer_gets_the_shares_in_the_dictionary_it_gave():
    base = pytest.importorskip("verl.trainer.ppo.v1.trainer_base", reason="this verl has no V1 trainer")
    from verl_r3_plugin.hosts.verl import trainer as wrapper

    assert "metrics" in inspect.signature(base.PPOTrainer._update_actor).parameters
    metrics = {"actor/r3_sum/fell_back": 3.0, "actor/r3_sum/trained": 12.0, "actor/r3_sum/rows": 0.0, "actor/lr": 1.0}
    wrapper._share(metrics, wrap=False)
    assert metrics == {"actor/lr": 1.0, "r3/fallback": 0.25}
