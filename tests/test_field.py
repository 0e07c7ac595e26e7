"""A batch row carries its own routes; a row that a host cloned onto other tokens, or that has none, is noticed and never replayed."""

import numpy as np
import pytest

from verl_r3_plugin import field
from verl_r3_plugin.errors import CodecError
from verl_r3_plugin.replay.local import LocalRoutes
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema
from verl_r3_plugin.trajectory import TrajectoryBuilder

SCHEMA = RouteSchema(300, 2, 4, (1, 2, 3))


def trajectory(tokens, seed=0):
    ids = np.random.default_rng(seed).random((len(tokens) - 1, 3, 300)).argsort(axis=2)[..., :2].astype(np.uint16)
    routes = RoutedExperts(SCHEMA, ids, np.ones(len(tokens) - 1, np.bool_))
    builder = TrajectoryBuilder(SCHEMA)
    builder.add_turn(tokens[:2], tokens[2:], routes)
    return builder.trajectories()[0]


TOKENS = [5, 6, 7, 8, 9, 10]


def test_a_row_comes_back_for_the_tokens_and_layers_that_are_asked_for():
    one = trajectory(TOKENS)
    found, reason = field.unpack(field.pack(one), TOKENS, schema=SCHEMA, rows=np.array([4, 0, 5]), layers=[0, 2])
    assert reason is None
    assert found.present.tolist() == [True, True, False]
    assert (np.sort(found.ids[:2]) == np.sort(one.routes.ids[[4, 0]][:, [0, 2]])).all()


@pytest.mark.parametrize("blob", [None, b"", np.zeros(0, np.uint8)])
def test_a_row_without_routes_is_a_row_without_routes(blob):
    found, reason = field.unpack(blob, TOKENS, schema=SCHEMA)
    assert reason == field.NO_ROUTES
    assert (len(found), found.present.any()) == (6, False)


@pytest.mark.parametrize("tokens", [[5, 6, 7, 8, 9, 11], TOKENS[:-1], [*TOKENS, 1], []])
def test_a_row_that_was_cloned_onto_other_tokens_is_not_replayed(tokens):
    found, reason = field.unpack(field.pack(trajectory(TOKENS)), tokens, schema=SCHEMA)
    assert reason == field.OTHER_TOKENS
    assert not found.present.any()


def test_bytes_that_do_not_decode_are_an_error():
    blob = bytearray(field.pack(trajectory(TOKENS)))
    blob[-1] ^= 1
    with pytest.raises(CodecError, match="checksum"):
        field.unpack(bytes(blob), TOKENS, schema=SCHEMA)


def test_rows_after_the_last_trained_token_are_absent():
    found, _ = field.unpack(field.pack(trajectory(TOKENS), last_trained=3), TOKENS, schema=SCHEMA)
    assert found.present.tolist() == [True] * 3 + [False] * 3


def test_a_trajectory_without_any_row_is_packed_as_nothing():
    builder = TrajectoryBuilder(SCHEMA)
    builder.add_turn([1], [2, 3], None)
    assert field.pack(builder.trajectories()[0]) == field.pack(None) == field.EMPTY


def test_a_column_holds_bytes_and_none():
    column = field.column([b"ab", None, b"ab"])
    assert column.dtype == object
    assert column.tolist() == [b"ab", None, b"ab"]


def test_a_rank_gets_its_own_rows_in_its_own_order_and_padding_is_live():
    sequences = [TOKENS, [1, 2, 3], [4, 4, 4, 4]]
    trajectories = [trajectory(tokens, seed) for seed, tokens in enumerate(sequences)]
    blobs = [field.pack(trajectories[0]), None, field.pack(trajectories[2])]
    # Tokens of the three sequences laid end to end are numbers 0-5, 6-8 and 9-12.
    rows = np.array([11, -1, 0, 7, 3, 12, 5])
    local = LocalRoutes.gather(blobs, [np.array(s) for s in sequences], rows, [1, 2], SCHEMA)
    assert local.valid.tolist() == [True, False, True, False, True, False, False]
    assert local.reasons == (None, field.NO_ROUTES, None)
    for place, (sequence, token) in {0: (2, 2), 2: (0, 0), 4: (0, 3)}.items():
        expected = trajectories[sequence].routes.ids[token, 1:]
        assert (np.sort(local.ids[:, place]) == np.sort(expected)).all()
    assert not local.ids[:, ~local.valid].any()
