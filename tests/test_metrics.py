"""The figures, against values worked out by hand."""

from math import exp, log

import numpy as np
import pytest

from verl_r3_plugin import metrics
from verl_r3_plugin.schema import RouteSchema


def test_fallback_is_judged_by_the_row_of_the_token_before():
    trained = np.array([0, 0, 1, 1, 0, 1], bool)
    replayed = np.array([1, 0, 1, 1, 0, 1], bool)
    # Tokens 2, 3 and 5 are trained; rows 1, 2 and 4 predict them, of which 1 and 4 fell back.
    assert metrics.fallback(trained, replayed) == {"r3/fallback": pytest.approx(2 / 3)}
    assert metrics.fallback(trained, np.ones(6, bool)) == {"r3/fallback": 0.0}


def test_mismatch_has_the_direction_and_the_threshold_it_says():
    rollout = np.log([0.5, 0.5, 0.1])
    trainer = np.log([0.5, 0.25 * 0.99, 0.19])
    found = metrics.mismatch(rollout, trainer)
    differences = [0.0, log(0.495), log(1.9)]
    assert found["r3/logprob_abs_diff"] == pytest.approx(sum(map(abs, differences)) / 3)
    assert found["r3/k3_kl"] == pytest.approx(sum(exp(d) - 1 - d for d in differences) / 3)
    assert found["r3/extreme_fraction"] == pytest.approx(1 / 3)


def test_agreement_is_a_share_of_experts_and_of_rows():
    assert metrics.agreement(30, 40) == {"r3/agreement": 0.75}
    assert metrics.agreement(30, 40, 3, 10) == {"r3/agreement": 0.75, "r3/agreement_rows": 0.3}


def test_bytes_are_compared_with_the_hosts_format_of_all_layers():
    schema = RouteSchema(256, 8, 40, tuple(range(2, 40)))
    assert metrics.size(schema, 10, 2450) == {"r3/bytes_per_token": 245.0, "r3/host_bytes_per_token": 320.0}
    assert metrics.size(schema, 10, 2450, padded_tokens=40)["r3/host_bytes_per_token"] == 1280.0
    assert metrics.size(RouteSchema(257, 8, 40, (0,)), 1, 1)["r3/host_bytes_per_token"] == 640.0


def test_figures_without_tokens_are_left_out():
    empty = np.zeros(0)
    assert metrics.fallback(empty.astype(bool), empty.astype(bool)) == {}
    assert metrics.mismatch(empty, empty) == {}
    assert metrics.agreement(0, 0) == {}
    assert metrics.coverage([]) == {}
    assert metrics.size(RouteSchema(4, 2, 1, (0,)), 0, 0) == {}
