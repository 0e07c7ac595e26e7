"""What the command says and how it ends, without running a loop."""

import json

import pytest
from typer.testing import CliRunner

from verl_r3_plugin.cli import app
from verl_r3_plugin.errors import ConfigError, R3Error

pytestmark = [pytest.mark.vllm, pytest.mark.verl, pytest.mark.megatron]

STEP = {
    "step": 1, "reward": 0.5, "reward_std": 0.1, "grad_norm": 1.0, "tokens": 10, "turns": 3, "coverage": 1.0, "fallback": 0.0,
    "agreement": 0.99, "bytes_per_token": 10.0, "host_bytes_per_token": 24.0, "push_logprob_diff": 0.01,
    **{name: {"live": 0.02, "replay": 0.01} for name in ("logprob_abs_diff", "k3_kl", "extreme_fraction")},
}  # fmt: skip


def run(monkeypatch, tmp_path, equal):
    from verl_r3_plugin.cli.demo import loop

    class Finished(loop.Demo):
        def run(self):
            self.on_step(STEP)
            return loop.Result([STEP], equal, {"rollouts": 1.0})

    monkeypatch.setattr(loop, "Demo", Finished)
    return CliRunner().invoke(app, ["demo", "--steps", "1", "--json", "--out", str(tmp_path)])


def test_a_run_whose_routes_differ_fails_after_its_figures_are_printed(monkeypatch, tmp_path):
    done = run(monkeypatch, tmp_path, False)
    assert isinstance(done.exception, R3Error)
    assert "exactly the experts that vLLM used" in str(done.exception)
    assert json.loads(done.stdout.splitlines()[-1])["routes_equal"] is False


@pytest.mark.parametrize("equal", [True, None])
def test_a_run_whose_routes_are_equal_or_were_not_compared_succeeds(monkeypatch, tmp_path, equal):
    done = run(monkeypatch, tmp_path, equal)
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout.splitlines()[-1])["routes_equal"] is equal


def test_an_unknown_kind_of_replay_is_refused_with_the_known_ones(tmp_path):
    done = CliRunner().invoke(app, ["demo", "--replay", "r3", "--out", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert "expected one of ['R3', 'off', 'both'], found 'r3'" in str(done.exception)
