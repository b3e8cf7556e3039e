"""What differs between two states of a table whose keys come and go: key by key, since which row a key has means
nothing.

A key lies in the bucket that the low bits of its hash say. So where the two are cut into different numbers of buckets,
one of the coarser cut has the keys of several of the finer one. Memory: one bucket of the coarser cut of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.vocabulary.dynamic_index import SHARED_KEY
from podembed.tools.inspect.row_difference import RowDifference, differing
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.files import read_bucket
from podembed.workers.storage.store import Store

_WAITING = ("waiting_key", "waiting_last", "waiting_count")


@dataclass(slots=True)
class KeyDifference:
    """What is known so far. Mutated by `add`.

    Attributes:
      removed, added: keys with a row that only one, or only the other state has.
      waiting: keys that wait in one state and not, or not with the same counts, in the other.
      num_changed: keys with a row in both, of which something differs.
      arrays: by name, differences of the rows of keys that both have, with keys in the place of row numbers.
    """

    removed: int = 0
    added: int = 0
    waiting: int = 0
    num_changed: int = 0
    arrays: dict[str, RowDifference] = field(default_factory=dict)

    def add(self, one: _Held, other: _Held, names: Sequence[str]) -> None:
        """Takes in all keys of the same buckets.

        Args:
          names: arrays that both have with equal width.
        """
        keys, at_one, at_other = np.intersect1d(one.keys, other.keys, assume_unique=True, return_indices=True)
        self.removed += len(one.keys) - len(keys)
        self.added += len(other.keys) - len(keys)
        self.waiting += len(one.waiting ^ other.waiting)
        changed = np.zeros(len(keys), bool)
        for name in names:
            values = one.arrays[name][at_one], other.arrays[name][at_other]
            changed |= differing(*values).any(axis=1)
            found = RowDifference()
            found.add(*values, first_row=0, row_stride=1)
            _merge(self.arrays.setdefault(name, RowDifference()), found, keys)
        self.num_changed += int(changed.sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What some buckets hold: keys with a row (int64 `[n]`), their arrays `[n, width]`, and what is known of waiting
    keys.
    """

    keys: np.ndarray
    arrays: dict[str, np.ndarray]
    waiting: set[tuple[int, int, int]]

    @staticmethod
    def of(store: Store, table: TableFiles, buckets: Sequence[int]) -> _Held:
        """Raises:
        ChunkDamaged: a file is not what was committed.
        """
        names = [array.name for array in table.arrays]
        parts: list[dict[str, np.ndarray]] = []
        waiting: set[tuple[int, int, int]] = set()
        for bucket in buckets:
            values = dict(zip(names, read_bucket(store, table, bucket), strict=True))
            held = values["last"][:, 0] != 0
            if not held[0] and values["rows"][0].any():
                # The row that keys without one train together.
                held[0], values["key"][0] = True, SHARED_KEY
            parts.append({name: value[held] for name, value in values.items() if name not in _WAITING})
            if _WAITING[0] in values:
                waits = values[_WAITING[1]][:, 0] != 0
                waiting |= {*zip(*(values[name][waits, 0].tolist() for name in _WAITING), strict=True)}
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        # Of several buckets the first one's shared row.
        keys, first = np.unique(arrays.pop("key")[:, 0], return_index=True)
        return _Held(keys, {name: value[first] for name, value in arrays.items()}, waiting)


def _merge(into: RowDifference, found: RowDifference, keys: np.ndarray) -> None:
    into.num_rows += found.num_rows
    into.num_changed += found.num_changed
    if found.max_row is None or found.first_row is None:
        return
    first = int(keys[found.first_row])
    into.first_row = first if into.first_row is None else min(into.first_row, first)
    if into.max_row is None or found.max_abs > into.max_abs:
        into.max_abs, into.max_row = found.max_abs, int(keys[found.max_row])


def key_difference(
    store: Store, table: TableFiles, other_store: Store, other: TableFiles, names: Sequence[str], *, skips_equal: bool
) -> KeyDifference:
    """Compares all keys of two states.

    Args:
      names: arrays that both have with equal width.
      skips_equal: buckets with equal digests hold the same, so they are not read.

    Raises:
      ChunkDamaged: a file that had to be read is not what was committed.
    """
    found = KeyDifference(arrays={name: RowDifference() for name in names})
    coarse = min(table.num_buckets, other.num_buckets)
    for bucket in range(coarse):
        if skips_equal and table.digests[bucket] == other.digests[bucket]:
            continue
        found.add(
            _Held.of(store, table, range(bucket, table.num_buckets, coarse)),
            _Held.of(other_store, other, range(bucket, other.num_buckets, coarse)),
            names,
        )
    return found
