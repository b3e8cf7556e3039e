"""Removing keys from a run for good: a newest commit without them, and the names of older ones that still have them.

A table that had one of the keys is written whole, not as a delta: a delta would leave their values in files that the
new commit needs. So nothing that it consists of holds the key any more, and older commits may go (`prune`). What else
has learned of a key stays: the dense model, and a row that keys without one share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from podembed.embedding.hashing import mix64
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.early_stopping import BEST
from podembed.orchestrator.api.vocabulary_totals import counters_of, totals_of
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.run.reference import CommittedState
from podembed.tools.inspect.rewriting import open_newest, rewrite, whole_table
from podembed.tools.inspect.written_keys import WrittenKeys
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.deltas import read_changes
from podembed.workers.checkpoint.files import read_base_bucket, read_bucket
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store

_WAITING = "waiting_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The result of `forget`, with keys as they were given.

    Attributes:
      commit: the new one; None where the newest one held none of the keys already.
      rows: keys that had a row.
      waiting: keys that waited for one.
      absent: keys that had neither.
      older: names of commits that count and hold one of the keys, in a row or in a file that they need. Newest first.
    """

    commit: str | None
    rows: tuple[str, ...]
    waiting: tuple[str, ...]
    absent: tuple[str, ...]
    older: tuple[str, ...]


def forget(
    url: str, table: str, keys: Sequence[str], *, single_writer: bool = False, unix_s: Callable[[], float] = time.time
) -> Forgotten:
    """Writes a newest commit of a run without some keys of a table. Memory: the buckets of one file with their slots.

    Args:
      keys: numbers or texts, as `extract` takes them.
      single_writer: accept a storage that cannot keep a driver out while this goes on.
      unix_s: the wall clock, for heartbeats and the record of when it was done.

    Raises:
      ConfigurationError: no run, nothing committed in it, no such table, or one whose keys do not come and go; or no
        commit holds any of the keys.
      StoreCannotCreateExclusively: the storage cannot, and that was not accepted.
      RunIsHeld: a driver is at work.
      NoLoadableCommit, ChunkDamaged: the newest commit is damaged; nothing has changed.
    """
    store, head = open_newest(url, single_writer=single_writer, purpose="forget keys of")
    files = CommittedState(store=store, manifest=head).table(table)
    meant = _meant(store, files, keys)
    wanted = _all_of(meant)
    in_rows, waiting = _held(store, files, wanted)
    older = holders(store, read_lineage(store)[1:], table, wanted)
    name = None
    if in_rows or waiting or _in_files(store, files, wanted):
        name = rewrite(
            store,
            head,
            lambda attempt, on_bucket: _without(store, head, files, wanted, attempt, on_bucket, num_rows=len(in_rows)),
            purpose="forget",
            unix_s=unix_s,
        ).name
        older = (head.name, *older)
    if name is None and not older:
        raise ConfigurationError(
            f"Found none of the keys {', '.join(keys)[:200]} in table '{table}' of {store.location}. Expected one that "
            "a commit has. Check how they are written: text:7 is the text of a number."
        )
    return Forgotten(
        commit=name,
        rows=tuple(key for key, numbers in meant.items() if in_rows & {*numbers}),
        waiting=tuple(key for key, numbers in meant.items() if waiting & {*numbers}),
        absent=tuple(key for key, numbers in meant.items() if not (in_rows | waiting) & {*numbers}),
        older=older,
    )


def holders(store: Store, names: Sequence[str], table: str, keys: np.ndarray) -> tuple[str, ...]:
    """Those of some commits of which a file holds one of the keys, be it that a later delta has taken it away. One
    that cannot be read may.

    Args:
      keys: int64 `[n]`.
    """
    found = []
    for name in names:
        try:
            tables = {files.name: files for files in checkpoint.load(store, name).tables}
            if table in tables and tables[table].is_dynamic and _in_files(store, tables[table], keys):
                found.append(name)
        except StorageError:
            found.append(name)
    return tuple(found)


def wanted_keys(store: Store, table: str, keys: Sequence[str]) -> np.ndarray:
    """int64 `[n]`, the keys that somebody wrote, of a table of the newest commit.

    Raises:
      ConfigurationError: no such table, or one whose keys do not come and go.
    """
    state = CommittedState(store=store, manifest=checkpoint.load(store, read_lineage(store)[0]))
    return _all_of(_meant(store, state.table(table), keys))


def _meant(store: Store, table: TableFiles, keys: Sequence[str]) -> dict[str, tuple[int, ...]]:
    if not table.is_dynamic:
        raise ConfigurationError(
            f"Found table '{table.name}', whose ids are the numbers of its rows. Expected one with a capacity, whose "
            "keys come and go. Name another table; `podembed inspect` says which have keys."
        )
    written = WrittenKeys(store, table)
    return {key: written.of(key) for key in keys}


def _all_of(meant: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    return np.unique(np.array([number for numbers in meant.values() for number in numbers], np.int64))


def _buckets(table: TableFiles, keys: np.ndarray) -> list[int]:
    return np.unique(table.layout.buckets_of(mix64(keys).view(np.int64))).tolist()


def _named(table: TableFiles, values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {array.name: value for array, value in zip(table.arrays, values, strict=True)}


def _places(arrays: dict[str, np.ndarray], keys: np.ndarray, prefix: str = "") -> np.ndarray:
    """bool, where rows or, with a prefix, waiting keys are some of the keys."""
    if f"{prefix}last" not in arrays:
        return np.zeros(len(arrays["last"]), bool)
    return np.isin(arrays[f"{prefix}key"][:, 0], keys) & (arrays[f"{prefix}last"][:, 0] != 0)


def _held(store: Store, table: TableFiles, keys: np.ndarray) -> tuple[set[int], set[int]]:
    """The keys that have a row, and those that wait for one."""
    in_rows: set[int] = set()
    waiting: set[int] = set()
    for bucket in _buckets(table, keys):
        arrays = _named(table, read_bucket(store, table, bucket))
        in_rows |= {*arrays["key"][_places(arrays, keys), 0].tolist()}
        if _WAITING + "key" in arrays:
            waiting |= {*arrays[_WAITING + "key"][_places(arrays, keys, _WAITING), 0].tolist()}
    return in_rows, waiting


def _in_files(store: Store, table: TableFiles, keys: np.ndarray) -> bool:
    """Whether a file that the table needs holds one of the keys, in its chunks or in a delta."""
    for bucket in _buckets(table, keys):
        pieces = [read_base_bucket(store, table, bucket)]
        for delta in table.deltas:
            if (found := delta.find(bucket)) is not None:
                sizes = {"num_buckets": table.num_buckets, "num_positions": table.rows_per_bucket}
                pieces.append(read_changes(store, *found, bucket, **sizes)[1])
        for values in pieces:
            arrays = _named(table, values)
            if (_places(arrays, keys) | _places(arrays, keys, _WAITING)).any():
                return True
    return False


def _without(
    store: Store,
    head: Manifest,
    table: TableFiles,
    keys: np.ndarray,
    attempt: str,
    on_bucket: Callable[[], None],
    *,
    num_rows: int,
) -> Manifest:
    """The newest commit without the keys.

    Args:
      num_rows: how many of them have a row.
    """
    buckets = {*_buckets(table, keys)}

    def change(bucket: int, values: Sequence[np.ndarray]) -> None:
        if bucket not in buckets:
            return
        arrays = _named(table, values)
        gone, left = _places(arrays, keys), _places(arrays, keys, _WAITING)
        for name, value in arrays.items():
            value[left if name.startswith(_WAITING) else gone] = 0

    whole = whole_table(store, table, attempt, on_bucket, change)
    counters, totals = dict(head.counters), totals_of(head.counters, table.name)
    if totals is not None:
        totals = replace(totals, num_keys=totals.num_keys - num_rows, evicted=totals.evicted + num_rows)
        counters |= counters_of({table.name: totals})
    return replace(
        head,
        tables=tuple(whole if one.name == table.name else one for one in head.tables),
        counters=counters,
        # An evaluation was of the state with the keys.
        metrics={name: value for name, value in head.metrics.items() if name == BEST},
    )
