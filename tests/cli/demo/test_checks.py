"""Negative controls of the demo's proof: it must fail on rows shifted by one and on swapped layers, and a withheld row must show as
fallback and as nothing else."""

import numpy as np
import pytest

from verl_r3_plugin import metrics
from verl_r3_plugin.cli.demo import checkpoint
from verl_r3_plugin.field import pack, unpack
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema
from verl_r3_plugin.trajectory import Trajectory

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

SCHEMA = RouteSchema(32, 4, 6, (1, 2, 3, 4, 5))


@pytest.fixture(scope="module")
def trainer():
    from verl_r3_plugin.cli.demo.trainer import Trainer

    return Trainer(checkpoint.random_weights(0), SCHEMA, 1e-3)


@pytest.fixture(scope="module")
def case():
    """(tokens, trained, full captures [tokens - 1, 6, 4]) of rows of different lengths, as a tap would have seen them."""
    random = np.random.default_rng(0)
    tokens = [random.integers(2, 128, length) for length in (21, 34, 13)]
    trained = [np.arange(len(ids)) >= 8 for ids in tokens]
    captures = []
    for ids in tokens:
        capture = random.random((len(ids) - 1, 6, 32)).argsort(axis=2)[..., :4].astype(np.uint8)
        capture[:, 0] = 0  # the dense layer's filler
        captures.append(capture)
    return tokens, trained, captures


def batch_of(case, change=lambda routes: routes):
    from verl_r3_plugin.cli.demo.trainer import Batch

    tokens, trained, captures = case
    blobs = []
    for ids, capture in zip(tokens, captures, strict=True):
        routes = change(RoutedExperts.join([RoutedExperts.from_capture(SCHEMA, capture), RoutedExperts.absent(SCHEMA, 1)]))
        none = np.full(len(ids), -1)
        blobs.append(pack(Trajectory(ids, routes, none, none)))
    return Batch(tokens, trained, [np.zeros(len(ids)) for ids in tokens], blobs)


def check(trainer, case, batch):
    from verl_r3_plugin.cli.demo.checks import routes_equal

    with trainer.record() as records:
        log_probs = trainer.log_probs(batch, replay=True)
    return routes_equal(records, case[2], case[1], SCHEMA), log_probs


def test_replay_of_what_was_captured_is_equal_in_every_row(trainer, case):
    (equal, compared, different), _ = check(trainer, case, batch_of(case))
    assert (equal, compared, different) == (True, 20 + 33 + 12, 0)


def test_rows_shifted_by_one_fail(trainer, case):
    def shift(routes):
        ids = np.roll(routes.ids, 1, axis=0)
        return RoutedExperts(SCHEMA, ids, np.roll(routes.present, 1)).drop(np.array([len(routes) - 1]))

    (equal, _, different), _ = check(trainer, case, batch_of(case, shift))
    assert not equal
    assert different > 50


def test_two_swapped_layers_fail(trainer, case):
    def swap(routes):
        return RoutedExperts(SCHEMA, np.ascontiguousarray(routes.ids[:, [1, 0, 2, 3, 4]]), routes.present)

    (equal, _, different), _ = check(trainer, case, batch_of(case, swap))
    assert not equal
    assert different > 50


def test_withheld_rows_show_as_fallback_and_as_nothing_else(trainer, case):
    tokens, trained, _ = case
    random = np.random.default_rng(1)
    withheld = [random.random(len(ids)) < 0.1 for ids in tokens]
    rows = iter(withheld)
    batch = batch_of(case, lambda routes: routes.drop(next(rows)))
    (_, compared, different), _ = check(trainer, case, batch)
    replayed = [unpack(blob, ids, schema=SCHEMA)[0].present for blob, ids in zip(batch.blobs, tokens, strict=True)]
    for seen, dropped in zip(replayed, withheld, strict=True):
        assert (seen[:-1] == ~dropped[:-1]).all()
    # Live routing of a random model never picks what random routes say, so each withheld row differs, and no other does.
    assert different == sum(int(dropped[:-1].sum()) for dropped in withheld)
    expected = np.mean(np.concatenate([dropped[:-1][mask[1:]] for dropped, mask in zip(withheld, trained, strict=True)]))
    fallback = metrics.fallback(np.concatenate(trained), np.concatenate(replayed))
    assert fallback["r3/fallback"] == pytest.approx(expected)
    assert compared == 65


def test_after_a_step_the_routers_choose_for_themselves_again(trainer, case):
    batch = batch_of(case)
    before = trainer.log_probs(batch, replay=False)
    check(trainer, case, batch)
    after = trainer.log_probs(batch, replay=False)
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
