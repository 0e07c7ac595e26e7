"""Makes `tests/support` importable here, and in the Ray workers that these tests start."""

import os
import sys
from pathlib import Path

import pytest

_TESTS = str(Path(__file__).parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_TESTS, os.environ.get("PYTHONPATH")]))


@pytest.fixture
def r3_on():
    """This process with R3 on and default settings, and as it was before when the test ends."""
    from verl_r3_plugin.hosts.verl import activation

    activation.arm()
    activation.decide({"actor": {"strategy": "megatron", "megatron": {"router_replay": {"mode": "R3"}}}})
    try:
        yield activation.state
    finally:
        activation.switch_off()
