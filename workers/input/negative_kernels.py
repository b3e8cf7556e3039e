"""Draws negatives in compiled loops, without the interpreter lock.

Every draw is a number of its own: SplitMix64 of the sample and of the draw's place in it. So a sample's negatives do
not depend on what other samples stand beside it.
"""

from __future__ import annotations

import numba
import numpy as np

from podembed.embedding.hashing import finalize, mix_word

# A draw that may not be is repeated so often. Who knows nearly every id may then get one of them.
MAX_TRIES = 128
_TRIES = np.uint64(MAX_TRIES)
_SCALE = 1.0 / (1 << 53)
_11 = np.uint64(11)
# Up to so many ids are compared one by one.
_FEW = 16


@numba.njit(nogil=True, cache=True)
def make_aliases(weights: np.ndarray, thresholds: np.ndarray, aliases: np.ndarray) -> None:
    """The tables of Vose, "A linear algorithm for generating random numbers with a given distribution", 1991.

    Args:
      weights: float64 `[n]`, 0 or more, some above.
      thresholds: float64 `[n]`, receives the chance that slot i stands for itself.
      aliases: int64 `[n]`, receives what it stands for otherwise.
    """
    count = len(weights)
    scale = count / weights.sum()
    small, large = np.empty(count, np.int64), np.empty(count, np.int64)
    num_small = num_large = 0
    for i in range(count):
        thresholds[i] = weights[i] * scale
        aliases[i] = i
        if thresholds[i] < 1.0:
            small[num_small] = i
            num_small += 1
        else:
            large[num_large] = i
            num_large += 1
    while num_small and num_large:
        num_small -= 1
        least, most = small[num_small], large[num_large - 1]
        aliases[least] = most
        thresholds[most] -= 1.0 - thresholds[least]
        if thresholds[most] < 1.0:
            num_large -= 1
            small[num_small] = most
            num_small += 1
    # What is left has a chance of 1 but for rounding.
    for i in range(num_small):
        thresholds[small[i]] = 1.0
    for i in range(num_large):
        thresholds[large[i]] = 1.0


@numba.njit(nogil=True, cache=True, inline="always")
def _is_among(ids, start, stop, wanted):
    """Whether rising ids have this one."""
    end = stop
    while start < stop:
        middle = (start + stop) >> 1
        if ids[middle] < wanted:
            start = middle + 1
        else:
            stop = middle
    return start < end and ids[start] == wanted


@numba.njit(nogil=True, cache=True, inline="always")
def _is_own(own, wanted):
    """Whether a sample has this row. Beyond a few they rise."""
    if len(own) > _FEW:
        return _is_among(own, 0, len(own), wanted)
    found = False
    for other in own:
        found |= other == wanted
    return found


@numba.njit(nogil=True, cache=True)
def _left(own, others, known, candidates, weights, first_row, num_rows):
    """The ids that may be drawn and are neither the sample's own, nor others, nor known, and their weights."""
    taken = np.sort(np.concatenate((own, others)))
    size = len(candidates) if len(candidates) else num_rows
    ids, found, count = np.empty(size, np.int64), np.empty(size, np.float64), 0
    for slot in range(size):
        id_ = candidates[slot] if len(candidates) else first_row + slot
        if not _is_among(taken, 0, len(taken), id_) and not _is_among(known, 0, len(known), id_):
            ids[count], found[count] = id_, weights[slot] if len(weights) else 1.0
            count += 1
    return ids[:count], found[:count]


@numba.njit(nogil=True, cache=True)
def _chosen(weights, word):
    """A place by its weight; -1 if all weights are 0."""
    wanted, last = np.float64(word >> _11) * _SCALE * weights.sum(), -1
    for at in range(len(weights)):
        if weights[at] > 0.0:
            last = at
            wanted -= weights[at]
            if wanted < 0.0:
                break
    return last


@numba.njit(nogil=True, cache=True)
def draw_negatives(
    values: np.ndarray,
    rows: np.ndarray,
    splits: np.ndarray,
    sample_ids: np.ndarray,
    known_begins: np.ndarray,
    known_ends: np.ndarray,
    known_ids: np.ndarray,
    candidates: np.ndarray,
    thresholds: np.ndarray,
    aliases: np.ndarray,
    first_row: int,
    num_rows: int,
    count: int,
    keeps: bool,
    offset: np.uint64,
    out: np.ndarray,
) -> None:
    """Writes for each id itself, if it is kept, and its negatives.

    Args:
      values, splits: int64, the ids of the samples.
      rows: int64, the row of each id, which is not drawn; -1 of one without any.
      sample_ids: int64 `[samples]`.
      known_begins, known_ends, known_ids: as of `mark_others`; they are not drawn.
      candidates: int64 `[n]`, what slot i of `thresholds` and `aliases` stands for. Empty to draw evenly.
      first_row, num_rows: rows of the table from which is drawn evenly.
      count: negatives of each id.
      offset: of the feature, the seed and the epoch.
      out: int64, receives everything.
    """
    at = 0
    for sample in range(len(sample_ids)):
        begin, end = splits[sample], splits[sample + 1]
        key = mix_word(np.uint64(sample_ids[sample]), offset)
        known_begin, known_end = known_begins[sample], known_ends[sample]
        own = np.sort(rows[begin:end]) if end - begin > _FEW else rows[begin:end]
        for i in range(begin, end):
            if keeps:
                out[at] = values[i]
                at += 1
            for draw in range(count):
                number = np.uint64((i - begin) * count + draw) * _TRIES
                drawn = np.int64(0)
                for trial in range(MAX_TRIES):
                    word = mix_word(number + np.uint64(trial), key)
                    # In a function of its own it takes twice as long, even where the compiler puts it in here.
                    if len(candidates):
                        slot = np.int64(word % np.uint64(len(candidates)))
                        if np.float64(finalize(word) >> _11) * _SCALE >= thresholds[slot]:
                            slot = aliases[slot]
                        drawn = candidates[slot]
                    else:
                        drawn = first_row + np.int64(word % np.uint64(num_rows))
                    if not _is_own(own, drawn) and not _is_among(known_ids, known_begin, known_end, drawn):
                        break
                out[at] = drawn
                at += 1


@numba.njit(nogil=True, cache=True)
def draw_distinct(
    values: np.ndarray,
    rows: np.ndarray,
    splits: np.ndarray,
    sample_ids: np.ndarray,
    known_begins: np.ndarray,
    known_ends: np.ndarray,
    known_ids: np.ndarray,
    candidates: np.ndarray,
    thresholds: np.ndarray,
    aliases: np.ndarray,
    first_row: int,
    num_rows: int,
    count: int,
    keeps: bool,
    offset: np.uint64,
    out: np.ndarray,
    weights: np.ndarray,
    sizes: np.ndarray,
) -> None:
    """As `draw_negatives`, with negatives of an id that all differ.

    Those that are hard to find by chance are drawn from a list of what is left. If nothing is, the only id of a sample
    has fewer of them. An id of a list has some twice, since what follows it has its place.

    Args:
      weights: float64 `[n]`, of the candidates; empty as they are.
      sizes: int64 `[samples]`, receives how much each sample has.
    """
    at = 0
    for sample in range(len(sample_ids)):
        begin, end = splits[sample], splits[sample + 1]
        key = mix_word(np.uint64(sample_ids[sample]), offset)
        known_begin, known_end = known_begins[sample], known_ends[sample]
        start = at
        own = np.sort(rows[begin:end]) if end - begin > _FEW else rows[begin:end]
        for i in range(begin, end):
            if keeps:
                out[at] = values[i]
                at += 1
            first, is_listed = at, False
            left, left_weights = np.empty(0, np.int64), np.empty(0, np.float64)
            for draw in range(count):
                number = np.uint64((i - begin) * count + draw) * _TRIES
                drawn, is_found = np.int64(0), False
                for trial in range(0 if is_listed else MAX_TRIES):
                    word = mix_word(number + np.uint64(trial), key)
                    if len(candidates):
                        slot = np.int64(word % np.uint64(len(candidates)))
                        if np.float64(finalize(word) >> _11) * _SCALE >= thresholds[slot]:
                            slot = aliases[slot]
                        drawn = candidates[slot]
                    else:
                        drawn = first_row + np.int64(word % np.uint64(num_rows))
                    is_taken = _is_own(own, drawn)
                    for other in range(first, at):
                        is_taken |= out[other] == drawn
                    if not is_taken and not _is_among(known_ids, known_begin, known_end, drawn):
                        is_found = True
                        break
                if not is_found:
                    if not is_listed:
                        known, others = known_ids[known_begin:known_end], out[first:at]
                        left, left_weights = _left(own, others, known, candidates, weights, first_row, num_rows)
                        is_listed = True
                    chosen = _chosen(left_weights, mix_word(number, key))
                    if chosen < 0 and end - begin == 1:
                        break
                    if chosen >= 0:
                        drawn, left_weights[chosen] = left[chosen], 0.0
                    else:
                        drawn = out[first + draw % max(1, at - first)] if at > first else values[i]
                out[at] = drawn
                at += 1
        sizes[sample] = at - start


@numba.njit(nogil=True, cache=True)
def mark_others(
    block: np.ndarray,
    own: np.ndarray,
    has_own: np.ndarray,
    known_begins: np.ndarray,
    known_ends: np.ndarray,
    known_ids: np.ndarray,
    out: np.ndarray,
) -> None:
    """Which ids of a block are candidates of each sample beside its own: all but that and those that it knows.

    Args:
      block: int64 `[c]`.
      own: int64 `[n]`.
      has_own: bool `[n]`, whether a sample has one at all.
      known_begins, known_ends: int64 `[n]`, where in `known_ids` those that the sample knows begin and end.
      known_ids: rising from each begin to its end.
      out: bool `[n, c]`, receives them.
    """
    for sample in range(len(own)):
        for i in range(len(block)):
            is_own = has_own[sample] and block[i] == own[sample]
            out[sample, i] = not (is_own or _is_among(known_ids, known_begins[sample], known_ends[sample], block[i]))


@numba.njit(nogil=True, cache=True, inline="always")
def _chance(row, chances, first_row, num_rows):
    if len(chances):
        return chances[row]
    return 1.0 / num_rows if row >= first_row else 0.0


@numba.njit(nogil=True, cache=True)
def add_chances(
    splits: np.ndarray, ids: np.ndarray, chances: np.ndarray, first_row: int, num_rows: int, out: np.ndarray
) -> None:
    """Writes with what chance one of the ids of each group is drawn.

    Args:
      splits: int64 `[groups + 1]`.
      ids: rows of the table, each once in a group.
      chances: float64 by row of the table; empty where is drawn evenly.
      first_row, num_rows: rows of the table from which is drawn evenly.
      out: float64 `[groups]`.
    """
    for group in range(len(splits) - 1):
        total = 0.0
        for at in range(splits[group], splits[group + 1]):
            total += _chance(ids[at], chances, first_row, num_rows)
        out[group] = total


@numba.njit(nogil=True, cache=True)
def free_shares(
    own: np.ndarray,
    splits: np.ndarray,
    known_begins: np.ndarray,
    known_ends: np.ndarray,
    known_ids: np.ndarray,
    known_shares: np.ndarray,
    chances: np.ndarray,
    first_row: int,
    num_rows: int,
    out: np.ndarray,
) -> None:
    """Writes with what chance an id is drawn that a sample neither has nor knows.

    Args:
      own, splits: int64, the rows of the samples; -1 of an id without any.
      known_begins, known_ends, known_ids: as of `draw_negatives`.
      known_shares: float64 `[samples]`, as `add_chances` has it of the ids that the sample knows.
      chances, first_row, num_rows: as of `add_chances`.
      out: float64 `[samples]`.
    """
    for sample in range(len(splits) - 1):
        taken, last = known_shares[sample], np.int64(-1)
        for row in np.sort(own[splits[sample] : splits[sample + 1]]):
            if row != last and not _is_among(known_ids, known_begins[sample], known_ends[sample], row):
                taken += _chance(row, chances, first_row, num_rows)
            last = row
        out[sample] = max(0.0, 1.0 - taken)
