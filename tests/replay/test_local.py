"""Rows and layers are cut before anything is decoded."""

from __future__ import annotations

import numpy as np
import pytest

from verl_r3_plugin import codec
from verl_r3_plugin.codec import envelope
from verl_r3_plugin.errors import ReplayError
from verl_r3_plugin.replay.local import LocalRoutes
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema

SCHEMA = RouteSchema(300, 3, 5, (1, 2, 3, 4))
TOKENS = [np.arange(6), np.arange(10, 14)]


def sequences():
    random = np.random.default_rng(0)
    whole, blobs = [], []
    for tokens in TOKENS:
        ids = random.random((len(tokens), 4, 300)).argsort(2)[..., :3].astype(np.uint16)
        present = np.ones(len(tokens), np.bool_)
        present[-1] = False
        ids[-1] = 0
        whole.append(ids)
        routes = RoutedExperts(SCHEMA, ids, present)
        blobs.append(codec.encode(routes, token_count=len(tokens), token_hash=codec.token_hash(tokens), encoding="raw"))
    return whole, blobs


def test_rows_come_in_the_order_asked_with_padding_and_absent_rows_invalid():
    whole, blobs = sequences()
    local = LocalRoutes.gather(blobs, TOKENS, np.array([7, 0, -1, 5, 6, 3]), [1, 3], SCHEMA)
    assert local.ids.shape == (2, 6, 3) and local.ids.dtype == np.uint16
    assert local.valid.tolist() == [True, True, False, False, True, True]
    flat = np.concatenate(whole)
    for position, row in ((0, 7), (1, 0), (4, 6), (5, 3)):
        assert (local.ids[:, position] == flat[row, [1, 3]]).all()
    assert local.reasons == (None, None)


def test_a_sequence_without_routes_or_with_other_tokens_is_routed_live_with_a_reason():
    _, blobs = sequences()
    local = LocalRoutes.gather([blobs[0], b""], [TOKENS[0] + 1, TOKENS[1]], np.arange(10), range(4), SCHEMA)
    assert not local.valid.any() and not local.ids.any()
    assert None not in local.reasons and len(set(local.reasons)) == 2


def test_only_asked_rows_and_layers_are_decoded(monkeypatch):
    _, blobs = sequences()
    asked = []
    original = envelope._encoding

    class Spy:
        def __init__(self, name):
            self.inner = original(name)

        def decode(self, body, rows_total, schema, rows, layers):
            asked.append((rows.tolist(), layers.tolist()))
            return self.inner.decode(body, rows_total, schema, rows, layers)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(envelope, "_encoding", Spy)
    LocalRoutes.gather(blobs, TOKENS, np.array([4, 1, 8]), [2], SCHEMA)
    assert asked == [([4, 1], [2]), ([2], [2])]


def test_a_stage_of_dense_layers_reads_nothing():
    local = LocalRoutes.gather([b"not an envelope"], [TOKENS[0]], np.arange(6), [], SCHEMA)
    assert local.ids.shape == (0, 6, 3) and not local.valid.any()


def test_a_row_beyond_the_sequences_is_refused():
    with pytest.raises(ReplayError, match="below 10"):
        LocalRoutes.gather(sequences()[1], TOKENS, np.array([10]), [0], SCHEMA)
