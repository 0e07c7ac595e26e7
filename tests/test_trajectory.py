"""Deltas of turns become one trajectory in which each row stays with its token; what does not fit is absent, and nothing is moved."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_r3_plugin import codec
from verl_r3_plugin.errors import ConfigError
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema
from verl_r3_plugin.trajectory import TrajectoryBuilder

SCHEMA = RouteSchema(64, 2, 3, (0, 2))


def rows_of(tokens, weights=0):
    """Routes that tell for each row which tokens it is of: they depend on the token, its position and the weights."""
    tokens = np.asarray(tokens)
    first = (tokens * 7 + np.arange(len(tokens)) * 3 + weights * 11) % 64
    ids = np.stack([first, (first + 1 + weights) % 64], axis=1)
    ids = np.stack([ids, (ids + 5) % 64], axis=1).astype(np.uint8)
    return RoutedExperts(SCHEMA, ids, np.ones(len(tokens), np.bool_))


def delta(tokens, start=0, weights=0):
    return rows_of(tokens, weights)[start : len(tokens) - 1]


TOKENS = list(range(100, 160))


def test_deltas_of_turns_give_every_row_but_the_last():
    builder = TrajectoryBuilder(SCHEMA)
    for prompt, total in ((10, 20), (30, 41), (45, 60)):
        start = builder.next_start()
        join = builder.add_turn(TOKENS[:prompt], TOKENS[prompt:total], delta(TOKENS[:total], start), start=start)
        assert (join.extends, join.added, join.refused) == (True, total - 1 - start, None)
    (trajectory,) = builder.trajectories()
    assert trajectory.token_ids.tolist() == TOKENS
    assert trajectory.routes[:59].equal_rows(rows_of(TOKENS)[:59]).all()
    assert not trajectory.routes.present[59]
    assert trajectory.coverage == 1.0


def test_the_row_of_a_turns_last_token_comes_from_the_next_turn():
    builder = TrajectoryBuilder(SCHEMA)
    builder.add_turn(TOKENS[:5], TOKENS[5:10], delta(TOKENS[:10]), version=1)
    assert builder.next_start(version=1) == 9
    assert builder.trajectories()[0].turn.tolist() == [0] * 9 + [-1]
    builder.add_turn(TOKENS[:12], TOKENS[12:15], delta(TOKENS[:15], 9, weights=2), start=9, version=2)
    (trajectory,) = builder.trajectories()
    assert trajectory.turn.tolist() == [0] * 9 + [1] * 5 + [-1]
    assert trajectory.version.tolist() == [1] * 9 + [2] * 5 + [-1]


@pytest.mark.parametrize(("policy", "kept"), [("first", 0), ("last", 2)])
def test_the_policy_says_which_capture_of_a_row_stays(policy, kept):
    builder = TrajectoryBuilder(SCHEMA, policy)
    builder.add_turn(TOKENS[:5], TOKENS[5:10], delta(TOKENS[:10]))
    builder.add_turn(TOKENS[:12], TOKENS[12:15], delta(TOKENS[:15], weights=2))
    (trajectory,) = builder.trajectories()
    assert trajectory.routes[:9].equal_rows(rows_of(TOKENS[:15], kept)[:9]).all()
    assert trajectory.routes[9:14].equal_rows(rows_of(TOKENS[:15], 2)[9:14]).all()


def test_a_turn_without_routes_leaves_a_gap_that_the_same_model_fills_and_another_does_not():
    for version, filled in ((1, True), (2, False)):
        builder = TrajectoryBuilder(SCHEMA)
        assert builder.add_turn(TOKENS[:5], TOKENS[5:10], None, version=1).refused == "no routes were returned"
        assert builder.gaps().tolist() == list(range(9))
        assert builder.next_start(version) == (0 if filled else 9)
        builder.add_turn(TOKENS[:12], TOKENS[12:15], delta(TOKENS[:15], weights=version), version=version)
        (trajectory,) = builder.trajectories()
        assert trajectory.routes.present.tolist() == [filled] * 9 + [True] * 5 + [False]
        assert trajectory.coverage == (1.0 if filled else 5 / 14)


def test_a_context_that_does_not_go_on_starts_a_new_segment():
    builder = TrajectoryBuilder(SCHEMA)
    builder.add_turn(TOKENS[:5], TOKENS[5:10], delta(TOKENS[:10]))
    other = [*TOKENS[:4], 7, 8, 9, 10, 11, 12, 13]
    assert not builder.add_turn(other[:8], other[8:], delta(other)).extends
    one, two = builder.trajectories()
    assert (one.token_ids.tolist(), two.token_ids.tolist()) == (TOKENS[:10], other)
    assert two.routes[:10].equal_rows(rows_of(other)[:10]).all()
    assert builder.segments == 2


def test_a_turn_without_tokens_adds_no_token_and_its_rows_are_used():
    builder = TrajectoryBuilder(SCHEMA)
    builder.add_turn(TOKENS[:5], TOKENS[5:10], delta(TOKENS[:10]))
    join = builder.add_turn(TOKENS[:14], [], delta(TOKENS[:14]))
    (trajectory,) = builder.trajectories()
    assert (len(trajectory), join.added) == (10, 0)
    builder.add_turn(TOKENS[:12], TOKENS[12:15], delta(TOKENS[:15], 9), start=9)
    assert builder.trajectories()[0].coverage == 1.0
    assert builder.add_turn([1, 2], [], None).refused is not None


@pytest.mark.parametrize(
    ("routes", "start", "reason"),
    [
        (rows_of(TOKENS[:10]), 0, "expected rows within the first 9 of 10 tokens, found rows 0 to 10"),
        (rows_of(TOKENS[:5]), 5, "found rows 5 to 10"),
        (rows_of(TOKENS[:5]), -1, "found rows -1 to 4"),
        (RoutedExperts.absent(RouteSchema(64, 2, 3, (0, 1)), 9), 0, "expected routes of"),
    ],
)
def test_rows_that_cannot_be_these_tokens_are_refused_and_absent(routes, start, reason):
    builder = TrajectoryBuilder(SCHEMA)
    join = builder.add_turn(TOKENS[:5], TOKENS[5:10], routes, start=start)
    assert reason in join.refused
    assert not builder.trajectories()[0].routes.present.any()


def test_a_wrong_policy_is_refused_with_the_key():
    with pytest.raises(ConfigError, match=r"custom\.r3\.policy: expected one of \['first', 'last'\], found 'best'"):
        TrajectoryBuilder(SCHEMA, "best")


def test_rows_after_the_last_trained_token_are_not_encoded_but_all_tokens_are_hashed():
    builder = TrajectoryBuilder(SCHEMA)
    builder.add_turn(TOKENS[:20], TOKENS[20:], delta(TOKENS))
    (trajectory,) = builder.trajectories()
    header = codec.read_header(trajectory.encode(last_trained=31))
    assert (header.rows, header.token_count, header.token_hash) == (31, 60, codec.token_hash(TOKENS))
    assert codec.read_header(trajectory.encode()).rows == 59


def test_cut_tokens_take_their_rows_with_them():
    builder = TrajectoryBuilder(SCHEMA)
    builder.add_turn(TOKENS[:20], TOKENS[20:], delta(TOKENS))
    cut = builder.trajectories()[0].select(slice(0, 30))
    assert cut.token_ids.tolist() == TOKENS[:30]
    assert cut.routes[:29].equal_rows(rows_of(TOKENS)[:29]).all()
    assert not cut.routes.present[29]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_turns_do_a_present_row_is_the_row_of_its_token(data):
    """Turns with any starts, losses, cuts of the context and weight updates: a row is either the earliest capture or absent."""
    builder = TrajectoryBuilder(SCHEMA)
    context, seen = [1, 2, 3], {}
    for version in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            context = [*context[: data.draw(st.integers(1, len(context)))], 90 + version]
        prompt = context + data.draw(st.lists(st.integers(0, 9), max_size=4))
        answer = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
        tokens = prompt + answer
        start = data.draw(st.integers(0, len(tokens) - 1))
        routes = data.draw(st.sampled_from([None, delta(tokens, start, version)]))
        builder.add_turn(prompt, answer, routes, start=start, version=version)
        seen[version] = (tokens, start, routes is not None)
        context = tokens
    for trajectory in builder.trajectories():
        ids = trajectory.token_ids.tolist()
        for row in trajectory.routes.present.nonzero()[0]:
            version = int(trajectory.version[row])
            tokens, start, had = seen[version]
            assert had and start <= row and tokens[: row + 1] == ids[: row + 1]
            assert (trajectory.routes.ids[row] == rows_of(ids, version).ids[row]).all()
        assert not trajectory.routes.present[-1]
