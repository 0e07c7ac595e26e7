"""Rows to ranks: every token's row goes to the rank and the place where VERL puts the token, in each layout.

The host's own functions place the token ids (each id is unique, so an id tells its token); the ranks are simulated by answering
Megatron's questions about rank and size.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.verl, pytest.mark.megatron]

LENGTHS = [7, 16, 1, 21]


@pytest.fixture
def ranks(monkeypatch):
    from megatron.core import parallel_state as mpu

    def be(tp=1, tp_rank=0, cp=1, cp_rank=0):
        for name, value in {
            "get_tensor_model_parallel_world_size": tp,
            "get_tensor_model_parallel_rank": tp_rank,
            "get_context_parallel_world_size": cp,
            "get_context_parallel_rank": cp_rank,
        }.items():
            monkeypatch.setattr(mpu, name, lambda value=value: value)

    return be


@pytest.fixture
def batch():
    ids = torch.arange(1000, 1000 + sum(LENGTHS))
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(LENGTHS)]))
    return torch.nested.nested_tensor_from_jagged(ids, offsets=offsets)


def chunk(fp8=None, sequence_parallel=False, **more):
    return SimpleNamespace(config=SimpleNamespace(fp8=fp8, sequence_parallel=sequence_parallel, **more))


def engine(use_remove_padding=True, **more):
    return SimpleNamespace(use_remove_padding=use_remove_padding, **more)


def rows(batch, chunk, engine, fused=False, **options):
    from verl_r3_plugin.hosts.verl.rows import local_rows

    return local_rows(batch, chunk, engine, fused=fused, batch_options=options)


def tokens_at(batch, rows):
    """The ids at `rows`, 0 for padding: what the host's placement of the ids themselves looks like."""
    return np.where(rows >= 0, batch.values().numpy()[rows], 0)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("fp8", [None, "e4m3"])
def test_packed_rows_lie_where_the_host_puts_the_tokens_and_every_token_has_one_rank(ranks, batch, tp, cp, fp8):
    from verl.models.mcore.util import preprocess_thd_engine

    seen = []
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            ranks(tp, tp_rank, cp, cp_rank)
            try:
                placed = preprocess_thd_engine(batch, pre_process=True, use_fp8_padding=fp8 is not None)[0].squeeze(0)
            except RuntimeError as error:  # verl 0.8 cannot split a sequence shorter than its fp8 padding: no batch gets that far
                assert fp8 and cp > 1
                pytest.skip(f"the host itself cannot place these tokens: {error}")
            expected = placed.chunk(tp)[tp_rank].numpy()
            found = rows(batch, chunk(fp8, sequence_parallel=tp > 1), engine())
            np.testing.assert_array_equal(tokens_at(batch, found), expected)
            seen.extend(found[found >= 0])
    assert sorted(seen) == list(range(sum(LENGTHS)))


def test_without_sequence_parallel_every_tensor_parallel_rank_routes_all_tokens(ranks, batch):
    ranks(tp=2, tp_rank=1)
    found = rows(batch, chunk(sequence_parallel=False), engine())
    assert sorted(found[found >= 0]) == list(range(sum(LENGTHS)))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
def test_padded_rows_are_sequence_first_as_megatron_runs_them(ranks, batch, tp, cp):
    from verl.models.mcore.util import preprocess_bshd_engine

    seen = []
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            ranks(tp, tp_rank, cp, cp_rank)
            placed, valid, _ = preprocess_bshd_engine(batch, pre_process=True)  # [batch, tokens]
            hidden = placed.transpose(0, 1)  # what the embedding hands on: [tokens, batch]
            expected = hidden.chunk(tp)[tp_rank].reshape(-1).numpy()
            found = rows(batch, chunk(sequence_parallel=tp > 1), engine(use_remove_padding=False))
            np.testing.assert_array_equal(tokens_at(batch, found), expected)
            assert valid.shape == placed.shape
            seen.extend(found[found >= 0])
    assert sorted(seen) == list(range(sum(LENGTHS)))


def test_bucket_padding_is_padding(ranks, batch):
    from inspect import signature

    from verl.models.mcore.util import preprocess_thd_engine

    from verl_r3_plugin.errors import HostError

    ranks()
    setting = engine(pad_to_length=True, pad_to_length_bucket=64)
    if "pad_to_length_bucket" not in signature(preprocess_thd_engine).parameters:
        with pytest.raises(HostError, match="pad_to_length_bucket"):
            rows(batch, chunk(), setting)
        return
    found = rows(batch, chunk(), setting)
    assert len(found) == 64 and (found[sum(LENGTHS) :] == -1).all()


def test_contiguous_context_parallel_is_followed_or_refused(ranks, batch):
    from inspect import signature

    from verl.models.mcore import util

    from verl_r3_plugin.errors import HostError

    contiguous = chunk(experimental_attention_variant="dsv4_hybrid", csa_window_size=4)
    seen = []
    supported = "cp_layout" in signature(util.preprocess_thd_engine).parameters
    for cp_rank in range(2):
        ranks(cp=2, cp_rank=cp_rank)
        if not supported:
            with pytest.raises(HostError, match="cp_layout"):
                rows(batch, contiguous, engine())
            continue
        if not getattr(util, "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE", False):
            # This Megatron-core cannot say "contiguous" to its attention, and the host refuses it by itself.
            with pytest.raises(ValueError, match="contiguous"):
                rows(batch, contiguous, engine())
            continue
        found = rows(batch, contiguous, engine())
        assert (np.diff(found[found >= 0]) > 0).all()
        seen.extend(found[found >= 0])
    assert not seen or sorted(seen) == list(range(sum(LENGTHS)))


def test_rows_shifted_by_one_would_be_noticed(ranks, batch):
    """The comparison above is worth something only if a shift fails it."""
    from verl.models.mcore.util import preprocess_thd_engine

    ranks(cp=2, cp_rank=1)
    expected = preprocess_thd_engine(batch, pre_process=True)[0].squeeze(0).numpy()
    found = rows(batch, chunk(), engine())
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(tokens_at(batch, np.roll(found, 1)), expected)
