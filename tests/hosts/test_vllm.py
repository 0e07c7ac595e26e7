import pytest

pytestmark = [pytest.mark.vllm]


def test_the_installed_vllm_captures_and_takes_a_start():
    from verl_r3_plugin.hosts import vllm

    assert vllm.facts() == {"installed": True, "captures": True, "http_routes": True, "http_deltas": True}
    assert vllm.describe(vllm.facts()) == "routes are returned natively"


def test_a_vllm_without_a_seam_is_described_with_what_to_install():
    from verl_r3_plugin.hosts.vllm import describe

    old = {"installed": True, "captures": False, "http_routes": False, "http_deltas": False}
    assert "install vLLM 0.22" in describe(old)
    assert "whole context each turn" in describe(old | {"captures": True, "http_routes": True})


def test_vllm_finds_and_calls_the_entry_point():
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="vllm.general_plugins", name="r3")
    entry.load()()
