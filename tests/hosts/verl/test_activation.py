"""Activation: armed in every process without importing anything, decided by the first configuration, gone where R3 is off."""

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.verl

ON = {"actor": {"strategy": "megatron", "megatron": {"router_replay": {"mode": "R3"}}}, "rollout": {"custom": None}}
OFF = {"actor": {"strategy": "megatron", "megatron": {"router_replay": {"mode": "disabled"}}}, "rollout": {"custom": None}}


def fresh(code: str, **environment: str):
    """What `code` prints as its last line, as JSON, in a fresh interpreter."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_importing_the_package_imports_no_host_and_no_torch():
    heavy = fresh(
        """
        import json, sys
        import verl_r3_plugin
        print(json.dumps([m for m in ("verl", "torch", "megatron", "vllm", "ray", "agentlightning") if m in sys.modules]))
        """
    )
    assert heavy == []


def test_importing_verl_arms_the_plugin_and_imports_neither_megatron_nor_its_engine():
    seen = fresh(
        """
        import json, sys
        import verl
        try:
            import importlib.metadata as m
            has_group = bool(m.entry_points(group="verl.plugins")) and "_plugins_policy" in vars(verl)
        except Exception:
            has_group = False
        if not has_group:
            import verl_r3_plugin
        from verl_r3_plugin.hosts.verl.activation import report
        print(json.dumps({
            "status": report()["status"],
            "heavy": [m for m in sys.modules if m.startswith(("megatron", "verl.workers", "verl.trainer", "vllm"))],
        }))
        """
    )
    assert seen == {"status": "armed", "heavy": []}


GATED = """
    import json, sys, time
    import verl, verl_r3_plugin
    from verl_r3_plugin.hosts.verl import activation
    import verl.workers.engine_workers as ew
    import verl.trainer.ppo.ray_trainer as rt
    import verl.experimental.agent_loop.agent_loop as al
    classes = [ew.ActorRolloutRefWorker, ew.TrainingWorker, rt.RayPPOTrainer, al.AgentLoopWorker]
    def functions():
        return {(c.__name__, n): f for c in classes for n, f in vars(c).items() if callable(f)}
"""


def test_with_r3_off_every_function_is_the_hosts_own_and_so_is_the_engine():
    seen = fresh(
        GATED
        + f"""
    gated = [k for k, f in functions().items() if getattr(f, "verl_r3_gate", False)]
    originals = {{k: f.__wrapped__ if getattr(f, "verl_r3_gate", False) else f for k, f in functions().items()}}
    activation.decide({OFF!r})
    now = functions()
    from verl.workers.engine import EngineRegistry, MegatronEngineWithLMHead
    import os
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    try:
        cls = EngineRegistry.get_engine_cls("language_model", "megatron")
    except AssertionError:  # verl 0.8 asks the machine only
        cls = EngineRegistry._engines["language_model"]["megatron"]["cuda"]
    print(json.dumps({{
        "gated": len(gated), "same": all(now[k] is originals[k] for k in now) and set(now) == set(originals),
        "status": activation.state.status, "engine_is_the_hosts": cls is MegatronEngineWithLMHead,
        "engine_module": "verl_r3_plugin.hosts.verl.engine" in sys.modules,
    }}))
    """
    )
    assert seen["gated"] >= 5
    assert seen["same"] and seen["engine_is_the_hosts"]
    assert seen["status"] == "off" and not seen["engine_module"]


def test_with_r3_on_the_registry_answers_with_the_replaying_engine_and_gives_the_hosts_back_after():
    seen = fresh(
        GATED
        + f"""
    originals = {{k: f.__wrapped__ if getattr(f, "verl_r3_gate", False) else f for k, f in functions().items()}}
    activation.decide({ON!r})
    before = "megatron" in sys.modules  # nothing so far may have needed it
    from verl.workers.engine import EngineRegistry, MegatronEngineWithLMHead
    import os
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    def lookup():
        try:
            return EngineRegistry.get_engine_cls("language_model", "megatron")
        except AssertionError:
            return EngineRegistry._engines["language_model"]["megatron"]["cuda"]
    ours = lookup()
    parts = list(activation.state.parts)
    value = EngineRegistry._engines["value_model"]["megatron"]["cuda"].__name__
    wrapped = [k[1] for k, f in functions().items() if f is not originals[k]]
    activation.switch_off()
    activation.decide({OFF!r})
    print(json.dumps({{
        "before": before, "name": ours.__name__, "subclass": issubclass(ours, MegatronEngineWithLMHead), "parts": parts,
        "wrapped": wrapped, "value": value,
        "back": lookup() is MegatronEngineWithLMHead, "same": all(functions()[k] is originals[k] for k in originals),
    }}))
    """
    )
    assert seen["name"] == "R3MegatronEngineWithLMHead" and seen["subclass"]
    assert seen["value"] == "MegatronEngineWithValueHead", "the critic's engine is the host's"
    assert set(seen["parts"]) >= {"engine", "trainer"}
    assert set(seen["wrapped"]) >= {"fit", "_compute_old_log_prob", "_update_actor"}
    assert seen["back"] and seen["same"]


@pytest.mark.parametrize(("section", "wanted"), [(ON, True), (OFF, False)])
def test_wants_r3_reads_dicts_and_omegaconf(section, wanted):
    from omegaconf import OmegaConf

    from verl_r3_plugin.hosts.verl.activation import wants_r3

    assert wants_r3(section) is wanted
    assert wants_r3(OmegaConf.create(section)) is wanted


@pytest.mark.parametrize(
    "actor",
    [
        {"strategy": "fsdp", "megatron": {"router_replay": {"mode": "R3"}}},
        {"strategy": "megatron", "megatron": {"router_replay": {"mode": "R2"}}},
        {"strategy": "megatron"},
    ],
    ids=["fsdp", "R2", "no router_replay"],
)
def test_only_the_two_keys_on_a_megatron_actor_ask_for_r3(actor):
    from verl_r3_plugin.hosts.verl.activation import wants_r3

    assert not wants_r3({"actor": actor})
