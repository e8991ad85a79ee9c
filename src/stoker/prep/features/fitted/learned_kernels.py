"""Loops over rows for learned features."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from stoker.ops.codegen import llvm_memory
from stoker.ops.codegen.jit import jit

__all__ = [
    "count_at", "deal_rows", "find_pairs", "first_of_pairs", "insert_pairs", "number_codes", "number_firsts",
    "refill_pairs", "rest_means", "rests_of_folds", "smoothed_means", "sum_folds", "take_counts", "take_numbers",
]  # fmt: skip

_prefetch: Any = llvm_memory.prefetch
_AHEAD = 16  # keys whose slots are asked for before they are looked at


_inline: Any = nb.njit(nogil=True, inline="always")


@_inline
def _mixed(key):  # type: ignore[no-untyped-def]
    h = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(29))


@jit
def sum_folds(places, folds, given, count, ends, order, fold_of, held, of_key, of_fold):  # type: ignore[no-untyped-def]
    """Sums of labels and numbers of rows: of each key and fold that has rows, of each key, of each fold.

    Labels of a key and fold are added in the order of the rows: the same bits however rows come in batches.

    Args:
        places, folds, given: [n] key and fold, and [n, 2] label and 1, of each row; or the sum and number of several.
        count: keys.
        ends: [count + 1] zeros; receives where the entries of each key begin and, last, how many there are.
        order: [n] room.
        fold_of, held: [n] and [n, 2]; receive the fold, and the sum and number, of each entry.
        of_key, of_fold: [count, 2] and [folds, 2] zeros; receive the totals.

    Returns:
        The number of entries.
    """
    for i in range(places.size):
        ends[places[i] + 1] += 1
    for key in range(count):
        ends[key + 1] += ends[key]
    for i in range(places.size):  # a counting sort: stable, so rows of a key stay in order
        order[ends[places[i]]] = i
        ends[places[i]] += 1
    width = of_fold.shape[0]
    sums, counts = np.zeros(width), np.zeros(width)
    begin, entries = 0, 0
    for key in range(count):
        stop = ends[key]  # where the rows of the next key begin
        ends[key] = entries
        for k in range(begin, stop):
            row = order[k]
            sums[folds[row]] += given[row, 0]
            counts[folds[row]] += given[row, 1]
        for fold in range(width):
            if counts[fold] > 0:
                fold_of[entries] = fold
                held[entries, 0], held[entries, 1] = sums[fold], counts[fold]
                of_key[key, 0] += sums[fold]
                of_key[key, 1] += counts[fold]
                of_fold[fold, 0] += sums[fold]
                of_fold[fold, 1] += counts[fold]
                sums[fold], counts[fold] = 0.0, 0.0
                entries += 1
        begin = stop
    ends[count] = entries
    return entries


@jit
def rests_of_folds(places, folds, labels, ends, order, of_key, of_fold, rest, rows):  # type: ignore[no-untyped-def]
    """What the other folds of its key hold for each row: sum of labels and number of rows, as those that
    :func:`sum_folds` finds, to the bit, without an entry per key and fold.

    Args:
        places, folds, labels: [n] key, fold and label of each row.
        ends: [keys + 1] zeros; room.
        order: [n] room.
        of_key: [keys, 2]; receives sum and number of rows of each key.
        of_fold: [folds, 2] zeros; receives those of each fold.
        rest, rows: [n]; receive sum and number.
    """
    for i in range(places.size):
        ends[places[i] + 1] += 1
    for key in range(ends.size - 1):
        ends[key + 1] += ends[key]
    for i in range(places.size):  # a counting sort: stable, so rows of a key stay in order
        order[ends[places[i]]] = i
        ends[places[i]] += 1
    width = of_fold.shape[0]
    sums, counts = np.zeros(width), np.zeros(width, np.int64)
    begin = 0
    for key in range(ends.size - 1):
        stop = ends[key]
        if stop == begin + 1:  # most keys of a long tail
            row = order[begin]
            of_key[key, 0], of_key[key, 1] = 0.0 + labels[row], 1.0
            of_fold[folds[row], 0] += 0.0 + labels[row]
            of_fold[folds[row], 1] += 1
            rest[row], rows[row] = 0.0, 0
        else:
            for k in range(begin, stop):
                row = order[k]
                sums[folds[row]] += labels[row]
                counts[folds[row]] += 1
            total = 0.0
            for fold in range(width):
                if counts[fold] > 0:
                    total += sums[fold]
                    of_fold[fold, 0] += sums[fold]
                    of_fold[fold, 1] += counts[fold]
            of_key[key, 0], of_key[key, 1] = total, stop - begin
            for k in range(begin, stop):
                row = order[k]
                rest[row] = total - sums[folds[row]]
                rows[row] = stop - begin - counts[folds[row]]
            if stop - begin < width:
                for k in range(begin, stop):
                    sums[folds[order[k]]], counts[folds[order[k]]] = 0.0, 0
            else:
                sums[:], counts[:] = 0.0, 0
        begin = stop


@jit
def rest_means(rest, rows, folds, others, smoothing):  # type: ignore[no-untyped-def]
    """Encodings of rows that teach, in place of ``rest``; ``others`` [folds]: the mean of all other folds."""
    for i in range(rest.size):
        prior = others[folds[i]]
        weight = rows[i] + smoothing
        rest[i] = (rest[i] + smoothing * prior) / weight if weight > 0 else prior


@jit
def deal_rows(rows, seed, folds, out):  # type: ignore[no-untyped-def]
    """splitmix64 of each number, exclusive or ``seed``, modulo ``folds``."""
    for i in range(rows.size):
        h = (np.uint64(rows[i]) ^ seed) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out[i] = (h ^ (h >> np.uint64(31))) % folds


@jit
def count_at(counts, places):  # type: ignore[no-untyped-def]
    """``counts[places[i]] += 1``."""
    for i in range(places.size):
        counts[places[i]] += 1


@jit
def smoothed_means(rows, folds, train, of_key, first, fold_of, held, mean, others, smoothing, out):  # type: ignore[no-untyped-def]
    """Encodings of rows whose keys are ``rows`` of the learned table, -1 for a key that it does not have.

    A training row leaves out its own fold: ``first``, ``fold_of`` and ``held`` as of :func:`sum_folds`, ``others``
    [folds]. ``of_key`` [keys, 2].
    """
    for i in range(rows.size):
        total, count, prior = 0.0, 0.0, mean
        row = rows[i]
        if row >= 0:
            total, count = of_key[row, 0], of_key[row, 1]
        if train[i]:
            prior = others[folds[i]]
            if row >= 0:
                for entry in range(first[row], first[row + 1]):
                    if fold_of[entry] == folds[i]:
                        total -= held[entry, 0]
                        count -= held[entry, 1]
                        break
        weight = count + smoothing
        out[i] = (total + smoothing * prior) / weight if weight > 0 else prior


@jit
def insert_pairs(slots, left, right, count, keys, out):  # type: ignore[no-untyped-def]
    """Number the pairs of two codes: ``slots`` [size, 2] holds a pair and its number + 1 (0: free), ``keys`` the pairs.

    Returns how many there are now; the caller has made room.
    """
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(left.size):
        key = np.int64(left[i]) << np.int64(32) | np.int64(right[i])
        at = _mixed(key) & mask
        while slots[at, 1] != 0 and slots[at, 0] != key:
            at = (at + np.uint64(1)) & mask
        if slots[at, 1] == 0:
            slots[at, 0] = key
            keys[count] = key
            count += 1
            slots[at, 1] = count
        out[i] = slots[at, 1] - 1
    return count


@jit
def first_of_pairs(left, right, ends, order, stamp, seen, out):  # type: ignore[no-untyped-def]
    """out[i]: the first row with the pair of codes of row i; returns how many pairs there are.

    Rows are dealt by their left code, and within one of these a table over all right codes tells. No hashing, and few
    pages: rows of one left code mostly follow each other, as in a log.

    Args:
        left, right: [n] codes.
        ends: [left codes + 1] zeros; room.
        order: [n] room.
        stamp, seen: [right codes] -1, and room.
        out: [n].
    """
    for i in range(left.size):
        ends[left[i] + 1] += 1
    for code in range(ends.size - 1):
        ends[code + 1] += ends[code]
    for i in range(left.size):
        order[ends[left[i]]] = i
        ends[left[i]] += 1
    begin, count = 0, 0
    for code in range(ends.size - 1):
        for k in range(begin, ends[code]):
            row = order[k]
            other = right[row]
            if stamp[other] != code:
                stamp[other] = code
                seen[other] = row
                count += 1
            out[row] = seen[other]
        begin = ends[code]
    return count


@jit
def number_firsts(out, left, right, keys):  # type: ignore[no-untyped-def]
    """The first row of a row's pair, ``out``, becomes the number of the pair, by first occurrence; ``keys`` keeps the
    pairs as :func:`insert_pairs` does."""
    count = 0
    for i in range(out.size):
        if out[i] == i:
            keys[count] = np.int64(left[i]) << np.int64(32) | np.int64(right[i])
            out[i] = count
            count += 1
        else:
            out[i] = out[out[i]]  # of an earlier row, so a number already


@jit
def find_pairs(slots, left, right, out):  # type: ignore[no-untyped-def]
    """The number of each pair of codes, -1 where it has none or a code is below 0."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(left.size):
        if i + _AHEAD < left.size:
            key = np.int64(left[i + _AHEAD]) << np.int64(32) | np.int64(right[i + _AHEAD])
            _prefetch(slots, np.int64(2 * (_mixed(key) & mask)))
        if left[i] < 0 or right[i] < 0:
            out[i] = -1
            continue
        if i > 0 and left[i] == left[i - 1] and right[i] == right[i - 1]:  # rows of one session or list
            out[i] = out[i - 1]
            continue
        key = np.int64(left[i]) << np.int64(32) | np.int64(right[i])
        at = _mixed(key) & mask
        while slots[at, 1] != 0 and slots[at, 0] != key:
            at = (at + np.uint64(1)) & mask
        out[i] = slots[at, 1] - 1


@jit
def refill_pairs(slots, keys, count):  # type: ignore[no-untyped-def]
    """Fill empty ``slots`` with the pairs there are."""
    mask = np.uint64(slots.shape[0] - 1)
    for number in range(count):
        at = _mixed(keys[number]) & mask
        while slots[at, 1] != 0:
            at = (at + np.uint64(1)) & mask
        slots[at, 0] = keys[number]
        slots[at, 1] = number + 1


@jit
def number_codes(numbers, codes, back, count, out):  # type: ignore[no-untyped-def]
    """out[i] = numbers[codes[i]]; a code that has none (-1) gets ``count``, which goes up, and ``back`` keeps it."""
    for i in range(codes.size):
        code = codes[i]
        found = numbers[code]
        if found < 0:
            found = count
            numbers[code] = found
            back[count] = code
            count += 1
        out[i] = found
    return count


@jit
def take_numbers(numbers, codes, out):  # type: ignore[no-untyped-def]
    """out[i] = numbers[codes[i]], -1 for a code that has none."""
    for i in range(codes.size):
        code = codes[i]
        out[i] = numbers[code] if 0 <= code < numbers.size else -1


@jit
def take_counts(counts, places, out):  # type: ignore[no-untyped-def]
    """out[i] = counts[places[i]]; -1 finds the last one."""
    for i in range(places.size):
        out[i] = counts[places[i]] if places[i] >= 0 else counts[counts.size - 1]
