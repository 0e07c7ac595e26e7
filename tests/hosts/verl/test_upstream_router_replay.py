"""VERL's own CPU tests of router replay, unchanged, with the plugin loaded. They need a checkout of VERL, named by VERL_REPO: its tests are
not in the wheel, and they belong to the version of VERL beside them, which is the one that is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.megatron, pytest.mark.slow]

FILES = (
    "tests/experimental/agent_loop/test_agent_loop_extra_fields_schema_on_cpu.py",
    "tests/trainer/ppo/test_rollout_moe_lb_metrics_on_cpu.py",
    "tests/utils/megatron/test_router_replay_model_walk_on_cpu.py",
    "tests/utils/test_megatron_bshd_preprocess.py",
    "tests/utils/test_megatron_router_replay_dcp.py",
    "tests/utils/veomni/test_router_replay_on_cpu.py",
    "tests/workers/rollout/test_llm_server_routed_experts_on_cpu.py",
    "tests/workers/test_router_replay_engine_helpers_on_cpu.py",
)
# Loaded as a pytest plugin: the run is worth something only if ours is really there.
PROBE = """
def pytest_sessionfinish(session, exitstatus):
    import verl
    from verl_r3_plugin.hosts.verl.activation import state
    print(f"VERL {verl.__file__} R3 {state.status}")
"""


@pytest.fixture(scope="module")
def checkout():
    named = os.environ.get("VERL_REPO")
    if not named:
        pytest.skip("VERL_REPO names no checkout of verl, whose own tests of router replay would run here")
    return Path(named).resolve()


@pytest.mark.parametrize("file", FILES)
def test_verls_own_test_passes_with_the_plugin_loaded(checkout, file, tmp_path):
    if not (checkout / file).exists():
        pytest.skip(f"this checkout has no {file}")
    (tmp_path / "r3_probe.py").write_text(PROBE)
    # One process a file: some of them put stubs in sys.modules.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", file, "-q", "-s", "-p", "no:cacheprovider", "-p", "r3_probe"],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(checkout), str(tmp_path)]),
            "VERL_USE_EXTERNAL_PLUGINS": "auto",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"VERL {checkout / 'verl/__init__.py'} R3 armed" in done.stdout
