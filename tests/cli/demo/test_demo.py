"""The main job, end to end, as a user starts it."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.agl, pytest.mark.verl, pytest.mark.megatron]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(figures, output folder) of `verl-r3 demo --steps 2 --json`."""
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "verl_r3_plugin", "demo", "--steps", "2", "--seed", "1", "--json", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), out


def test_every_trained_token_is_replayed_with_exactly_the_experts_of_vllm(run):
    figures, _ = run
    assert figures["routes_equal"] is True
    assert len(figures["steps"]) == 2
    for step in figures["steps"]:
        assert step["coverage"] == 1.0
        assert step["fallback"] == 0.0
        assert 0.8 <= step["agreement"] <= 0.995


def test_replay_removes_the_mismatch_that_live_routing_shows(run):
    for step in run[0]["steps"]:
        assert step["k3_kl"]["replay"] <= step["k3_kl"]["live"] / 5
        assert step["logprob_abs_diff"]["replay"] < step["logprob_abs_diff"]["live"]


def test_the_model_is_really_trained_and_pushed(run):
    one, two = run[0]["steps"]
    for step in (one, two):
        assert step["reward_std"] > 0
        assert step["grad_norm"] > 0
        assert step["turns"] == 48
        assert step["push_logprob_diff"] < 0.05
    assert one["tokens"] != two["tokens"]


def test_the_figures_have_the_promised_names(run):
    figures, out = run
    assert set(figures) == {"parts", "steps", "routes_equal"}
    assert {"vllm", "verl", "agentlightning", "megatron-core"} <= set(figures["parts"])
    assert set(figures["steps"][0]) == {
        "step", "reward", "reward_std", "grad_norm", "tokens", "turns", "coverage", "fallback", "agreement", "logprob_abs_diff", "k3_kl",
        "extreme_fraction", "bytes_per_token", "host_bytes_per_token", "push_logprob_diff",
    }  # fmt: skip
    # 5 MoE layers of ceil(log2 C(32, 4)) = 16 bits are 10 bytes a token; the envelopes' headers come on top.
    assert 9.5 < figures["steps"][0]["bytes_per_token"] < 12
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "exactly the experts that vLLM used" in page


def test_no_server_outlives_the_demo(run):
    assert processes_of(run[1]) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_server_outlives_a_demo_that_is_interrupted(number, tmp_path):
    command = [sys.executable, "-m", "verl_r3_plugin", "demo", "--out", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        # vLLM is the first server to be started, the gateway the second; vLLM then starts a process for its engine.
        deadline = time.monotonic() + 90
        while len(children := psutil.Process(demo.pid).children(recursive=True)) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(children) >= 3
        demo.send_signal(number)
        demo.communicate(timeout=60)
    finally:
        if demo.poll() is None:
            demo.kill()
    assert demo.returncode != 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


def processes_of(out):
    """Command lines of running processes that name the folder."""
    return [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if any(str(out) in part for part in p.info["cmdline"] or [])]
