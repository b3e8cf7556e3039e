"""`DynamicIndex`: which row a key has where keys come and go.

All decisions of a step are made before any lookup of it, from the keys that all hosts name and the state after the step
before. A bucket decides alone. So they are the same on any number of hosts. They run while the update of the step
before may still be under way. That changes nothing, since what a step names keeps its row in the step after it, too.

The order: idle keys are forgotten; named keys are counted; those that may get a row do, for which others may have to
go; the others wait, or not.

State of the run are columns of the table: they are saved, moved between hosts and undone with the row. The maps are
derived from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.hashing import combine, mix64
from podembed.embedding.kernels import vocabulary as kernels
from podembed.embedding.kernels.key_map import lines_per_bucket, new_lines, rebuild_map
from podembed.embedding.row_index import KeyedRows, KeyRequest
from podembed.embedding.vocabulary.policies import (
    EVICTIONS,
    Always,
    LeastFrequent,
    MinCount,
    Probability,
    VocabularyCounts,
)

if TYPE_CHECKING:
    from podembed.embedding.vocabulary.key_space import DynamicKeys

_NO_NUMBERS = np.empty(0, np.int64)
# A share of a bucket's rows that a key which finds it full makes free at once. One at a time, every new key would read
# when all others were named.
_SHARE_FORGOTTEN = 16
# Keys that are looked for side by side.
_CHUNK = 64
# An idle key is found by sweeps, of which there are so many in `forget_after` steps.
_SWEEPS = 16
_REMEMBERED = 1 << 16
SHARED_KEY = int(np.int64(combine(0x73686172) >> 1))
"""Of the row of all keys without one: its first value is that of this key."""


class _Map:
    """A key map and its books, of the buckets held here. Mutable."""

    def __init__(self, num_places: int, per_bucket: int) -> None:
        self.per_bucket = lines_per_bucket(per_bucket)
        self.lines = new_lines(num_places, self.per_bucket)
        self.hints = np.zeros(num_places, np.int32)
        self.fills = np.zeros(num_places, np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, int]:
        return self.lines, self.lines.view(np.uint16), self.per_bucket


class DynamicIndex:
    """As `RowIndex`. Mutated: everything but the arguments, and columns of the table.

    Attributes:
      admitted, evicted, refused, dropped, returned: as of `VocabularyCounts`, since `take_counts`.
    """

    is_dynamic = True

    def __init__(self, keys: DynamicKeys, table: KeyedRows, layout: BucketLayout) -> None:
        self._keys, self._table = keys, table
        self._per_bucket, self._most_waiting = layout.rows_per_bucket, keys.waiting_per_bucket(layout)
        self._buckets = np.ascontiguousarray(table.buckets, np.int64)
        self._places = np.full(layout.num_buckets, -1, np.int32)
        num_places = len(self._buckets)
        self._places[self._buckets] = np.arange(num_places)
        num_rows = num_places * self._per_bucket
        self._num_rows = num_rows
        self._map = _Map(num_places, self._per_bucket)
        self._occupied, self._marks = np.zeros(num_rows, np.uint8), np.zeros(num_rows, np.int32)
        most = max(1, (self._per_bucket - keys.num_reserved) // _SHARE_FORGOTTEN)
        self._heap = _heap(most)
        self._waiting: _Map | None = None
        if self._most_waiting:
            self._waiting = _Map(num_places, self._most_waiting)
            self._waiting_keys = np.zeros(num_rows, np.int64)
            self._waiting_last, self._waiting_counts = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.uint32)
            self._waiting_heap = _heap(0)
        self._slots = np.zeros((0, 2), np.int64)
        self._scratch = np.empty((4, 0), np.int64)
        self._chunk = np.empty((2, _CHUNK), np.int64)
        # When the newest key of the columns was named, until the first step after they were read. A commit right after
        # a look ahead holds what the step ahead decided. Decided again, its keys would count twice.
        self._newest = 0
        # Rows of the last request lie in one half of the spare rows, those of the one before in the other.
        self._half = 0
        # Keys that lost their row last, and when: of each place the newest. For a hint, so it is no state of the run.
        self._lost, self._lost_at = np.zeros(_REMEMBERED, np.int64), np.zeros(_REMEMBERED, np.int64)
        self._has_lost = False
        self.admitted = self.evicted = self.refused = self.dropped = self.returned = 0

    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys, last steps and counts of all rows, where they lie."""
        view = self._table.in_place()
        keys, last, counts = (view[name].reshape(-1) for name in ("key", "last", "count"))
        return keys.view(np.int64), last.view(np.int32), counts.view(np.uint32)

    def accept(self, requests: Sequence[KeyRequest], step: int | None) -> None:
        """As `RowIndex.accept`."""
        decides = step is None or self._newest != step + 1
        self._newest = self._newest if step is None else 0
        try:
            self._accept(requests, step, decides=decides)
        except BaseException:
            # An interrupt, or more keys than there are spare rows: what is derived of the columns may be half done.
            self._marks[:] = 0
            self._slots[:] = 0
            self.rebuild()
            self.decide_again()
            raise

    def _accept(self, requests: Sequence[KeyRequest], step: int | None, *, decides: bool) -> None:
        """Args: decides: where not, keys are pinned, but not counted again."""
        touched, seen, unknown, came = self._look_up(requests, is_training=step is not None)
        rows = np.full(len(unknown), -1, np.int64)
        if step is not None:
            keys, last, counts = self._columns()
            self._table.announce(touched)
            kernels.touch(touched, seen if decides else np.zeros_like(seen), step + 1, self._marks, last, counts)
            if decides and (len(unknown) or self._keys.forget_after is not None):
                self._decide(step, unknown, came, rows, (keys, last, counts))
            if decides and self._keys.default != "shared":
                self.dropped += int(np.count_nonzero(rows < 0))
        if len(unknown):
            self._give_defaults(unknown, rows)
            for request in requests:
                kernels.fill_unknown(request.out, rows)
        kernels.clear_slots(self._slots, unknown)

    def _look_up(
        self, requests: Sequence[KeyRequest], *, is_training: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rows of the keys that have one. Returns the rows that are named and how often, and the same of the keys that
        have none.
        """
        total = sum(len(request.keys) for request in requests)
        num_slots = 1 << max(4, (2 * total - 1).bit_length())
        if len(self._slots) < num_slots:
            self._slots = np.zeros((num_slots, 2), np.int64)
        if self._scratch.shape[1] < total:
            self._scratch = np.empty((4, total + total // 4), np.int64)
        sizes = np.zeros(2, np.int64)
        for request in requests:
            times = _NO_NUMBERS if request.times is None else request.times
            bad = kernels.look_up(
                request.keys,
                times,
                request.out,
                is_training,
                self._places,
                self._per_bucket,
                self._map.arrays,
                self._marks,
                *self._scratch[:2],
                self._slots,
                *self._scratch[2:],
                sizes,
                self._chunk,
            )
            if bad >= 0:
                num_held, num_buckets = len(self._buckets), len(self._places)
                raise ValueError(
                    f"Found a request for key {request.keys[bad]}, of a bucket that this host does not hold. Expected "
                    f"one of its {num_held} of {num_buckets} buckets. Check that all hosts are of one generation."
                )
        num_touched, num_unknown = sizes.tolist()
        named, unknown = self._scratch[:2, :num_touched], self._scratch[2:, :num_unknown]
        return named[0], named[1], unknown[0], unknown[1]

    def _decide(
        self,
        step: int,
        unknown: np.ndarray,
        came: np.ndarray,
        rows: np.ndarray,
        columns: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Who is forgotten and who gets a row; writes the rows of the unknown keys that get one."""
        now, (keys, last, counts) = step + 1, columns
        places = self._places[self._keys.hashes_of(unknown) & (len(self._places) - 1)].astype(np.int64)
        totals, entries = came.copy(), np.full(len(unknown), -1, np.int64)
        if self._waiting is not None:
            kernels.find_waiting(unknown, places, self._per_bucket, self._waiting.arrays, entries)
            waits = entries >= 0
            self._waiting_last[entries[waits]] = now
            totals[waits] += self._waiting_counts[entries[waits]]
        gone, left = self._sweep(step, keys, last)
        asks = self._asking(step, unknown, totals, came)
        order = asks[np.lexsort((unknown[asks], -totals[asks], places[asks]))]
        more = self._admit(order, unknown, places, now, keys, last, counts, rows)
        gone = np.concatenate([gone, more])
        admitted = np.flatnonzero(rows >= 0)
        self.admitted += len(admitted)
        self.refused += len(order) - len(admitted)
        self.evicted += len(gone)
        self._note_returns(unknown[admitted], keys[gone], now)
        changed = self._wait(unknown, places, totals, entries, rows, now, left)
        self._write(gone, rows[admitted], unknown[admitted], totals[admitted], now, changed)

    def _note_returns(self, admitted: np.ndarray, lost: np.ndarray, now: int) -> None:
        """Counts the admitted keys that are remembered as lost, and remembers those that lost their row just now."""
        self._has_lost = self._has_lost or len(lost) > 0
        if not self._has_lost:
            return
        idle, places = self._keys.forget_after, self._keys.hashes_of(admitted) >> 32 & _REMEMBERED - 1
        is_recent = self._lost_at[places] >= max(1, now - (idle or now))
        self.returned += int(np.count_nonzero(is_recent & (self._lost[places] == admitted)))
        places = self._keys.hashes_of(lost) >> 32 & _REMEMBERED - 1
        self._lost[places], self._lost_at[places] = lost, now

    def _sweep(self, step: int, keys: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forgets idle keys. Returns the rows that lost their key, and entries of keys that wait no more."""
        idle = self._keys.forget_after
        if idle is None:
            return _NO_NUMBERS, _NO_NUMBERS
        due = np.flatnonzero((step - self._buckets) % max(1, idle // _SWEEPS) == 0)
        gone = np.empty(len(due) * self._per_bucket, np.int64)
        books = self._map
        count = kernels.sweep(
            due,
            step + 1,
            idle,
            self._per_bucket,
            books.arrays,
            self._occupied,
            books.hints,
            books.fills,
            keys,
            last,
            gone,
        )
        left, num_left = np.empty(len(gone) if self._waiting else 0, np.int64), 0
        if self._waiting is not None:
            num_left = kernels.sweep_waiting(
                due,
                step + 1,
                idle,
                self._per_bucket,
                self._waiting.arrays,
                self._waiting_keys,
                self._waiting_last,
                self._waiting.hints,
                self._waiting.fills,
                left,
            )
        return gone[:count], left[:num_left]

    def _asking(self, step: int, unknown: np.ndarray, totals: np.ndarray, came: np.ndarray) -> np.ndarray:
        """int64, numbers of the unknown keys that ask for a row."""
        admit = self._keys.admit
        if isinstance(admit, Always):
            return np.arange(len(unknown))
        if isinstance(admit, MinCount):
            return np.flatnonzero(totals >= admit.count)
        return np.flatnonzero(coins(unknown, step, self._table.table_seed) < chances(admit, came))

    def _admit(
        self,
        order: np.ndarray,
        unknown: np.ndarray,
        places: np.ndarray,
        now: int,
        keys: np.ndarray,
        last: np.ndarray,
        counts: np.ndarray,
        rows: np.ndarray,
    ) -> np.ndarray:
        """Gives rows to the keys of `order` where there are some. Returns the rows of keys that had to go."""
        evict, books = self._keys.evict, self._map
        # No more than all rows of the buckets that are asked.
        gone = np.empty(min(self._num_rows, len(order) * len(self._heap[0])), np.int64)
        count = kernels.admit(
            order,
            unknown,
            places,
            now,
            EVICTIONS[type(evict)],
            evict.half_life if isinstance(evict, LeastFrequent) else 1,
            self._keys.num_reserved,
            self._per_bucket,
            books.arrays,
            self._occupied,
            books.hints,
            books.fills,
            keys,
            last,
            counts,
            self._table.in_place()["rows"],
            self._heap,
            rows,
            gone,
        )
        return gone[:count]

    def _wait(
        self,
        unknown: np.ndarray,
        places: np.ndarray,
        totals: np.ndarray,
        entries: np.ndarray,
        rows: np.ndarray,
        now: int,
        left: np.ndarray,
    ) -> np.ndarray:
        """Notes the keys that got no row. Returns the entries that changed."""
        books = self._waiting
        if books is None:
            return _NO_NUMBERS
        own = self._waiting_keys, self._waiting_last, books.hints, books.fills
        served = entries[(rows >= 0) & (entries >= 0)]
        kernels.leave(served, self._per_bucket, books.arrays, *own)
        others = np.flatnonzero(rows < 0)
        order = others[np.argsort(places[others], kind="stable")]
        if len(self._waiting_heap[0]) < len(order):
            self._waiting_heap = _heap(len(order))
        # An entry may be named when its key comes, when it goes, and when another one takes it.
        changed = np.empty(3 * len(order), np.int64)
        count = kernels.wait(
            order,
            unknown,
            places,
            totals,
            entries,
            now,
            self._most_waiting,
            self._per_bucket,
            books.arrays,
            self._waiting_keys,
            self._waiting_last,
            self._waiting_counts,
            books.hints,
            books.fills,
            self._waiting_heap,
            changed,
        )
        return np.unique(np.concatenate([left, served, changed[:count]]))

    def _write(
        self,
        gone: np.ndarray,
        rows: np.ndarray,
        keys: np.ndarray,
        totals: np.ndarray,
        now: int,
        waiting: np.ndarray,
    ) -> None:
        """Brings the columns of the table up to date."""
        table = self._table
        free = gone[self._occupied[gone] == 0]
        if len(free):
            shapes = {name: (len(free), values.shape[1]) for name, values in table.in_place().items()}
            nothing = {
                name: np.zeros(shape, np.float32) for name, shape in shapes.items() if not name.startswith("waiting_")
            }
            table.set_columns(free, nothing)
        if len(rows):
            counts = np.minimum(totals, kernels.MOST_COUNT).astype(np.uint32)
            last = np.full(len(rows), now, np.int32)
            table.begin_rows(rows, keys, {"key": words(keys), "last": words(last), "count": words(counts)})
            kernels.settle(rows, self._occupied)
        if len(waiting):
            last = self._waiting_last[waiting]
            waits = last != 0
            columns = {
                "waiting_key": words(np.where(waits, self._waiting_keys[waiting], 0)),
                "waiting_last": words(last),
                "waiting_count": words(np.where(waits, self._waiting_counts[waiting], np.uint32(0))),
            }
            table.set_columns(waiting, columns)

    def _give_defaults(self, unknown: np.ndarray, rows: np.ndarray) -> None:
        """Gives keys without a row one to be read in this request alone."""
        without = np.flatnonzero(rows < 0)
        if not len(without):
            return
        if self._keys.default == "shared":
            places = self._places[self._keys.hashes_of(unknown[without]) & (len(self._places) - 1)]
            rows[without] = places.astype(np.int64) * self._per_bucket
            return
        self._half = 1 - self._half
        first_value = self._keys.default == "first"
        rows[without] = self._table.spare_rows(self._half, unknown[without] if first_value else None)

    def take_counts(self) -> VocabularyCounts:
        """What became of keys since the last call."""
        found = VocabularyCounts(
            num_keys=int(self._map.fills.sum()),
            num_rows=self._num_rows - len(self._buckets) * self._keys.num_reserved,
            admitted=self.admitted,
            evicted=self.evicted,
            refused=self.refused,
            dropped=self.dropped,
            returned=self.returned,
            num_buckets=len(self._buckets),
            num_full=int(np.count_nonzero(self._map.fills >= self._per_bucket - self._keys.num_reserved)),
        )
        self.admitted = self.evicted = self.refused = self.dropped = self.returned = 0
        return found

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        """As `RowIndex.rows_of`."""
        rows = np.empty(len(keys), np.int64)
        held = self._places[self._keys.hashes_of(np.ascontiguousarray(keys, np.int64)) & (len(self._places) - 1)] >= 0
        rows[~held] = -1
        found = np.empty(int(held.sum()), np.int64)
        request = KeyRequest(np.ascontiguousarray(keys[held], np.int64), found)
        *_, unknown, _ = self._look_up([request], is_training=False)
        kernels.clear_slots(self._slots, unknown)
        rows[held] = np.maximum(found, -1)
        return rows

    def first_keys(self, bucket: int) -> np.ndarray:
        """As `RowIndex.first_keys`."""
        return np.full(self._keys.num_reserved, SHARED_KEY, np.int64)

    @property
    def existing_rows(self) -> np.ndarray:
        """int64, rising: rows that have values."""
        exists = self._occupied != 0
        if self._keys.num_reserved:
            exists[:: self._per_bucket] = True
        return np.flatnonzero(exists)

    def rebuild(self) -> None:
        """As `RowIndex.rebuild`."""
        keys, last, _ = self._columns()
        if self._keys.num_reserved and last[:: self._per_bucket].any():
            raise ValueError(
                "Found keys at the rows that are to be shared by keys without one. Expected the rows of a table with "
                "default='shared'. Go on with the default that the run began with, or begin a new run."
            )
        np.not_equal(last, 0, out=self._occupied, casting="unsafe")
        self._rebuild(self._map, keys, last)
        if self._waiting is not None:
            view = self._table.in_place()
            self._waiting_keys[:] = view["waiting_key"].reshape(-1).view(np.int64)
            self._waiting_last[:] = view["waiting_last"].reshape(-1).view(np.int32)
            self._waiting_counts[:] = view["waiting_count"].reshape(-1).view(np.uint32)
            if self._waiting_last.reshape(-1, self._per_bucket)[:, self._most_waiting :].any():
                raise ValueError(
                    f"Found keys that wait where a bucket has room for {self._most_waiting}. Expected no more. "
                    "Go on with the waiting=... that the run began with, or a larger one, or begin a new run."
                )
            self._rebuild(self._waiting, self._waiting_keys, self._waiting_last)

        waiting = 0 if self._waiting is None else int(self._waiting_last.max(initial=0))
        self._newest = max(waiting, int(last.max(initial=0)))

    def decide_again(self) -> None:
        """Also a step that the columns hold already is decided: what it names need not be what was named then."""
        self._newest = 0

    def _rebuild(self, books: _Map, keys: np.ndarray, last: np.ndarray) -> None:
        for place in range(len(self._buckets)):
            rebuild_map(*books.arrays, keys, last, self._per_bucket, place)
        books.hints[:] = 0
        books.fills[:] = np.count_nonzero(last.reshape(-1, self._per_bucket), axis=1)


def _heap(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return np.empty(size, np.float64), np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)


def words(values: np.ndarray) -> np.ndarray:
    """Numbers of 32 or 64 bits as float32 of the same bits, `[n, 1 or 2]`."""
    return np.ascontiguousarray(values).view(np.float32).reshape(len(values), -1)


def coins(keys: np.ndarray, step: int, seed: int) -> np.ndarray:
    """float64 `[n]` from 0 to 1: how the coin of a key falls in a step."""
    of_step = mix64(np.array([step ^ seed], np.int64))
    return mix64((mix64(keys) ^ of_step).view(np.int64)).astype(np.float64) * 2.0**-64


def chances(admit: Probability, came: np.ndarray) -> np.ndarray:
    """float64 `[n]`: 1 - (1 - p)^n for so many occurrences, the same on every machine."""
    numbers, inverse = np.unique(came, return_inverse=True)
    return np.array([1 - math.pow(1 - admit.probability, number) for number in numbers.tolist()])[inverse]
