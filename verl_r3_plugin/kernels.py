"""Compiled loops of the codec and of the validity check, used where numba is installed and the input is large enough to repay a call.

Every function has a numpy twin (in `codec/bits.py`, `codec/combinations.py`, `routes.py`) that gives the same bytes; a test compares
the two. Importing this module imports numba (half a second) and compiles nothing: numba compiles at the first call and keeps the
result on disk.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def _leading_zeros(typing_context, value):
    def build(context, builder, signature, arguments):
        from llvmlite import ir

        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@njit(cache=True, nogil=True)
def write_fields(low, high, bits, words):
    """Fields `low + high * 2**64` of `bits` bits each, one after another, into zeroed little-endian `words`."""
    zero, mask = np.uint64(0), np.uint64(63)
    position = np.uint64(0)
    for i in range(low.shape[0]):
        word = np.int64(position >> np.uint64(6))
        shift = position & mask
        words[word] |= low[i] << shift
        if shift != zero:
            words[word + 1] |= low[i] >> (np.uint64(64) - shift)
        if bits > 64:
            words[word + 1] |= high[i] << shift
            if shift != zero:
                words[word + 2] |= high[i] >> (np.uint64(64) - shift)
        position += np.uint64(bits)


@njit(cache=True, nogil=True)
def read_fields(words, rows, columns, per_row, bits, low, high):
    """Fields at (row, column) of a table with `per_row` fields a row; the inverse of `write_fields`."""
    zero, one, mask = np.uint64(0), np.uint64(1), np.uint64(63)
    low_mask = ~zero if bits >= 64 else (one << np.uint64(bits)) - one
    high_mask = (one << np.uint64(bits - 64)) - one if bits > 64 else zero
    out = 0
    for r in range(rows.shape[0]):
        for c in range(columns.shape[0]):
            position = np.uint64((rows[r] * per_row + columns[c]) * bits)
            word = np.int64(position >> np.uint64(6))
            shift = position & mask
            value = words[word] >> shift
            if shift != zero:
                value |= words[word + 1] << (np.uint64(64) - shift)
            low[out] = value & low_mask
            if bits > 64:
                value = words[word + 1] >> shift
                if shift != zero:
                    value |= words[word + 2] << (np.uint64(64) - shift)
                high[out] = value & high_mask
            out += 1


@njit(cache=True, nogil=True)
def rank(ids, binomial, low):
    """Rank of each combination; returns the first row that is none (an id twice or out of range), or -1. Below 64 bits.

    An id's place is counted, not found by sorting: no branch depends on the ids, which makes it five times faster.
    """
    experts, top_k = binomial.shape[0] - 1, ids.shape[1]
    for i in range(ids.shape[0]):
        total, places = np.uint64(0), 0
        for k in range(top_k):
            value = ids[i, k]
            if value >= experts:
                return i
            place = 0
            for j in range(top_k):
                place += ids[i, j] < value
            places += place
            total += binomial[value, place]
        if 2 * places != top_k * (top_k - 1):
            return i
        low[i] = total
    return -1


@njit(cache=True, nogil=True)
def rank_wide(ids, binomial, binomial_high, low, high):
    """`rank` for ranks of 65 to 128 bits."""
    experts, top_k = binomial.shape[0] - 1, ids.shape[1]
    for i in range(ids.shape[0]):
        total, total_high, places = np.uint64(0), np.uint64(0), 0
        for k in range(top_k):
            value = ids[i, k]
            if value >= experts:
                return i
            place = 0
            for j in range(top_k):
                place += ids[i, j] < value
            places += place
            before = total
            total += binomial[value, place]
            total_high += binomial_high[value, place] + np.uint64(total < before)
        if 2 * places != top_k * (top_k - 1):
            return i
        low[i], high[i] = total, total_high
    return -1


@njit(cache=True, nogil=True)
def _bucket(low, high):
    """Index of a value by its bit length and the five bits below its leading one; small values are their own index."""
    zero = np.uint64(0)
    if high != zero:
        length = np.uint64(128) - _leading_zeros(high)
        shift = length - np.uint64(6)
        if shift >= np.uint64(64):
            top = high >> (shift - np.uint64(64))
        else:
            top = (low >> shift) | (high << (np.uint64(64) - shift))
        return np.int64(length * np.uint64(32) + (top & np.uint64(31)))
    if low < np.uint64(64):
        return np.int64(low)
    length = np.uint64(64) - _leading_zeros(low)
    return np.int64(length * np.uint64(32) + ((low >> (length - np.uint64(6))) & np.uint64(31)))


@njit(cache=True, nogil=True)
def fill_hints(binomial, binomial_high, hints):
    """hints[k, bucket]: the largest n with C(n, k + 1) in an earlier bucket, where the search for a value in `bucket` may start."""
    experts, top_k = binomial.shape[0] - 1, binomial.shape[1]
    for k in range(top_k):
        n = k
        for bucket in range(hints.shape[1]):
            while n + 1 < experts and _bucket(binomial[n + 1, k], binomial_high[n + 1, k]) < bucket:
                n += 1
            hints[k, bucket] = n


@njit(cache=True, nogil=True)
def unrank(low, columns, hints, ids):
    """Combinations, ascending, of ranks below 64 bits; `low` is used up. columns: [top_k, experts + 1].

    One position of all sets after the other: within a set each step waits for the one before it, between sets none does.
    """
    for k in range(columns.shape[0] - 1, 0, -1):
        column, hint = columns[k], hints[k]
        for i in range(low.shape[0]):
            rest = low[i]
            n = np.int64(hint[_bucket(rest, np.uint64(0))])
            # Two steps without a branch nearly always suffice; the loop is for the rest.
            n += column[n + 1] <= rest
            n += column[n + 1] <= rest
            while column[n + 1] <= rest:
                n += 1
            low[i] = rest - column[n]
            ids[i, k] = n
    for i in range(low.shape[0]):
        ids[i, 0] = low[i]


@njit(cache=True, nogil=True)
def unrank_wide(low, high, columns, columns_high, hints, ids):
    """`unrank` for ranks of 65 to 128 bits; `low` and `high` are used up."""
    for k in range(columns.shape[0] - 1, 0, -1):
        column, column_high, hint = columns[k], columns_high[k], hints[k]
        for i in range(low.shape[0]):
            rest, rest_high = low[i], high[i]
            n = np.int64(hint[_bucket(rest, rest_high)])
            while column_high[n + 1] < rest_high or (column_high[n + 1] == rest_high and column[n + 1] <= rest):
                n += 1
            high[i] = rest_high - column_high[n] - np.uint64(column[n] > rest)
            low[i] = rest - column[n]
            ids[i, k] = n
    for i in range(low.shape[0]):
        ids[i, 0] = low[i]


@njit(cache=True, nogil=True)
def valid_rows(ids, experts, out):
    """out[row]: every id of the row below `experts` and none twice in one layer. ids: [rows, layers, top_k]."""
    rows, layers, top_k = ids.shape
    for r in range(rows):
        good = True
        for layer in range(layers):
            for k in range(top_k):
                value = ids[r, layer, k]
                good &= 0 <= value < experts
                for j in range(k):
                    good &= ids[r, layer, j] != value
            if not good:
                break
        out[r] = good


@njit(cache=True, nogil=True)
def take_valid(array, columns, experts, ids, present):
    """ids[row, c] = array[row, columns[c]] and present[row], or zeros and False where `valid_rows` would say so."""
    top_k = array.shape[2]
    for r in range(array.shape[0]):
        good = True
        for c in range(columns.shape[0]):
            layer = columns[c]
            for k in range(top_k):
                value = array[r, layer, k]
                good &= 0 <= value < experts
                ids[r, c, k] = value
                for j in range(k):
                    good &= array[r, layer, j] != value
            if not good:
                ids[r] = 0
                break
        present[r] = good
