"""Sets of K out of E as numbers: the combinatorial number system.

The set c_1 < c_2 < ... < c_K has rank C(c_1, 1) + C(c_2, 2) + ... + C(c_K, K), a bijection with 0 .. C(E, K) - 1
(Knuth, TAOCP 4A, 7.2.1.3). Ranks of more than 64 bits (512 experts, top-10: 69) are held as two uint64 arrays, low and high.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np

from ..compiled import kernels_for
from ..errors import CodecError

_LOW = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Combinations:
    """The sets of `top_k` out of `experts`, and the tables to rank them with."""

    experts: int
    top_k: int
    count: int
    bits: int
    binomial: np.ndarray  # uint64 [experts + 1, top_k]: low half of C(n, k + 1); what no rank can reach is the largest value
    binomial_high: np.ndarray  # uint64 [experts + 1, top_k]: high half

    @property
    def wide(self) -> bool:
        """Ranks need a second uint64."""
        return self.bits > 64

    def rank(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """(low, high) uint64 [sets] of `ids` [sets, top_k], in any order within a set."""
        if kernels := kernels_for(len(ids)):
            low = np.empty(len(ids), np.uint64)
            high = np.empty(len(ids) if self.wide else 0, np.uint64)
            if self.wide:
                bad = kernels.rank_wide(ids, self.binomial, self.binomial_high, low, high)
            else:
                bad = kernels.rank(ids, self.binomial, low)
            if bad >= 0:
                raise self._not_a_set(ids, bad)
            return low, high if self.wide else None
        # [top_k, sets]: a position of all sets at a time, so that each step runs over neighbours in memory.
        ordered = np.ascontiguousarray(np.sort(ids, axis=1).T)
        bad_sets = ordered[-1] >= self.experts
        for k in range(1, self.top_k):
            bad_sets |= ordered[k] == ordered[k - 1]
        if bad_sets.any():
            raise self._not_a_set(ids, int(bad_sets.argmax()))
        low = np.zeros(len(ids), np.uint64)
        high = np.zeros(len(ids), np.uint64) if self.wide else None
        for k in range(self.top_k):
            part = self.binomial[:, k].take(ordered[k])
            low += part
            if high is not None:
                high += self.binomial_high[:, k].take(ordered[k])
                high += low < part
        return low, high

    def unrank(self, low: np.ndarray, high: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
        """ids [sets, top_k], ascending; the ranks must be below `count` (ask `first_out_of_range`)."""
        ids = np.empty((len(low), self.top_k), dtype)
        if kernels := kernels_for(len(low)):
            columns, columns_high, hints = _search_tables(self.experts, self.top_k)
            if self.wide:
                kernels.unrank_wide(low.copy(), high.copy(), columns, columns_high, hints, ids)
            else:
                kernels.unrank(low.copy(), columns, hints, ids)
            return ids
        rest, rest_high = low.copy(), None if high is None else high.copy()
        for k in range(self.top_k - 1, 0, -1):
            n = self._largest(k, rest, rest_high)
            if rest_high is not None:
                rest_high -= self.binomial_high[n, k] + (self.binomial[n, k] > rest)
            rest -= self.binomial[n, k]
            ids[:, k] = n
        ids[:, 0] = rest  # C(n, 1) = n
        return ids

    def first_out_of_range(self, low: np.ndarray, high: np.ndarray | None) -> int:
        """Index of the first rank that is no set's, or -1."""
        last = self.count - 1
        bad = low > np.uint64(last & _LOW)
        if high is not None:
            last_high = np.uint64(last >> 64)
            bad = (high > last_high) | ((high == last_high) & bad)
        return int(bad.argmax()) if bad.any() else -1

    def _largest(self, k: int, rest: np.ndarray, rest_high: np.ndarray | None) -> np.ndarray:
        """The largest n with C(n, k + 1) <= rest."""
        column = self.binomial[:-1, k]
        if rest_high is None:
            return np.searchsorted(column, rest, side="right") - 1
        column_high = self.binomial_high[:-1, k]
        n = np.full(len(rest), k, np.intp)
        step = 1 << (self.experts.bit_length() - 1)
        while step:
            trial = np.minimum(n + step, self.experts - 1)
            fits = (column_high[trial] < rest_high) | ((column_high[trial] == rest_high) & (column[trial] <= rest))
            n = np.where(fits, trial, n)
            step >>= 1
        return n

    def _not_a_set(self, ids: np.ndarray, index: int) -> CodecError:
        return CodecError(
            f"expected {self.top_k} different expert ids below {self.experts}, found {ids[index].tolist()} "
            f"as the {index}th set; such a row must be absent"
        )


@lru_cache(maxsize=16)
def combinations(experts: int, top_k: int) -> Combinations:
    """Tables for the sets of `top_k` out of `experts`; CodecError beyond 128 bits a set."""
    count = comb(experts, top_k)
    bits = (count - 1).bit_length()
    if bits > 128:
        raise CodecError(
            f"expected at most 128 bits a set, found {bits} for top-{top_k} of {experts} experts; set custom.r3.codec=packed for this model"
        )
    # With top-k above half of the experts, a column can grow past what the ranks need, and past the dtype.
    largest = (1 << (128 if bits > 64 else 64)) - 1
    exact = [[min(comb(n, k + 1), largest) for k in range(top_k)] for n in range(experts + 1)]
    binomial = np.array([[value & _LOW for value in row] for row in exact], np.uint64)
    binomial_high = np.array([[value >> 64 for value in row] for row in exact], np.uint64)
    return Combinations(experts, top_k, count, bits, binomial, binomial_high)


@lru_cache(maxsize=16)
def _search_tables(experts: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tables by column, and where the compiled search starts in each (see `kernels.fill_hints`)."""
    from .. import kernels

    table = combinations(experts, top_k)
    hints = np.zeros((top_k, 129 * 32), np.uint16)
    kernels.fill_hints(table.binomial, table.binomial_high, hints)
    return np.ascontiguousarray(table.binomial.T), np.ascontiguousarray(table.binomial_high.T), hints
