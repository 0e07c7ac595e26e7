"""What all tests share: skipping where a host is not installed, and one real vLLM server for all that need one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

# `support` is importable here and in the processes that tests start.
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import pytest

HOSTS = {"vllm": "vllm", "agl": "agentlightning", "verl": "verl", "megatron": "megatron"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {mark: module for mark, module in HOSTS.items() if importlib.util.find_spec(module) is None}
    for item in items:
        for mark, module in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"{module} is not installed in this environment"))


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory):
    """(port, served model name, checkpoint folder) of a running vLLM (CPU build) with the demo's model of seed 0.

    A test that changes its weights puts them back.
    """
    from verl_r3_plugin.cli.demo.checkpoint import make_checkpoint
    from verl_r3_plugin.cli.demo.servers import free_port, start_vllm, wait_for_vllm

    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "seed0", 0)
    port = free_port()
    with start_vllm(folder, "r3-test", port, tmp_path_factory.mktemp("logs") / "vllm.log") as server:
        wait_for_vllm(server, port)
        yield port, "r3-test", folder
