"""How the tables of a new run begin from another run's commit: bucket by bucket, also where that commit cut a table
into another number.

What comes from where is decided in `orchestrator.run.warm_start`; here it is carried out by each host for the buckets
that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.table.table import Table
from podembed.embedding.vocabulary.dynamic_index import words
from podembed.workers.checkpoint.bucket_overlap import Cut, overlap, partners
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.files import read_bucket, read_bucket_array
from podembed.workers.checkpoint.shard import CheckpointMismatch
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStart:
    """The beginning of one table of a new run.

    Attributes:
      source: the commit's table to load; None for initial values.
      with_slots: whether slots are loaded too; otherwise they begin with their initial values.
      num_rows: number of rows of the table; may be more than the source has, and those then keep their initial values.
        None: as many.
      num_steps: steps after which the source was committed.
    """

    table: str
    num_buckets: int
    source: TableFiles | None
    with_slots: bool = True
    num_rows: int | None = None
    num_steps: int = 0


def begin_tables(
    store: Store, tables: Sequence[Table], starts: Sequence[TableStart], *, on_chunk: Callable[[], None]
) -> None:
    """Fills this host's part of every table, and its index. Padding gets the values that it has in a table that begins
    anew.

    Args:
      store: store of the run that is started from.
      starts: one a table, in the same order.
      on_chunk: called after each bucket that begins anew, and after each file that was read.

    Raises:
      ChunkDamaged: a file is missing or is not what was committed.
      CheckpointMismatch: a bucket has fewer rows than keys.
    """
    for table, start in zip(tables, starts, strict=True):
        table.initialize(on_part=on_chunk)
        if start.source is not None and table.index.is_dynamic:
            _take_keys(store, table, start.source, start, on_chunk=on_chunk)
        elif start.source is not None:
            out = {int(bucket): [*table.bucket(int(bucket)).values()] for bucket in table.buckets}
            if not start.with_slots:
                out = {bucket: arrays[:1] for bucket, arrays in out.items()}
            read_buckets(
                store,
                start.source,
                num_buckets=start.num_buckets,
                num_rows=start.num_rows,
                out=out,
                with_slots=start.with_slots,
                on_chunk=on_chunk,
            )
        table.index.rebuild()


def _take_keys(
    store: Store, table: Table, source: TableFiles, start: TableStart, *, on_chunk: Callable[[], None]
) -> None:
    """Gives the keys of a commit rows in the order of its buckets and rows, so on any number of hosts the same. Keys
    that wait for a row do so no more.
    """
    spec, places = table.spec, np.full(table.spec.layout.num_buckets, -1)
    places[table.buckets] = np.arange(len(table.buckets))
    per_bucket, num_reserved = spec.layout.rows_per_bucket, len(table.index.first_keys(0))
    filled = np.full(len(table.buckets), num_reserved)
    arrays = (source.arrays[0], *source.slots) if start.with_slots else source.arrays[:1]
    for source_bucket in _buckets_with_keys(source, table):
        found = read_bucket(store, source, source_bucket)
        values = {array.name: one for array, one in zip(source.arrays, found, strict=True)}
        on_chunk()
        own, positions = _keys_of(source, source_bucket, values, start.num_steps)
        place = places[spec.keys.hashes_of(own["key"]) & (len(places) - 1)]
        order = np.argsort(place, kind="stable")[np.count_nonzero(place < 0) :]
        place, positions = place[order], positions[order]
        came = np.bincount(place, minlength=len(filled))
        rows = place * per_bucket + filled[place] + np.arange(len(place)) - (np.cumsum(came) - came)[place]
        filled += came
        if (filled > per_bucket).any():
            fullest = int(filled.argmax())
            raise CheckpointMismatch(
                f"Found at least {filled[fullest]:,} keys of the commit for bucket {table.buckets[fullest]} of table "
                f"'{spec.name}', which has {per_bucket:,} rows. Expected room for all. Begin with a larger capacity."
            )
        columns = {array.name: values[array.name][positions] for array in arrays}
        table.store.write(rows, columns | {name: words(one[order]) for name, one in own.items()})
        if num_reserved and source.is_dynamic and not values["last"][0] and values["rows"][0].any():
            shared = np.flatnonzero(table.buckets % source.num_buckets == source_bucket) * per_bucket
            table.store.write(shared, {array.name: values[array.name][:1].repeat(len(shared), 0) for array in arrays})


def _keys_of(
    source: TableFiles, bucket: int, values: Mapping[str, np.ndarray], num_steps: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The keys of a bucket that have a row, with their counts and last steps as seen from the first step of this run,
    and the positions of the rows. Keys of a table of row numbers are those, named just before the run and never
    counted.
    """
    if not source.is_dynamic:
        keys = source.layout.ids_of(bucket)
        last, count = np.full(len(keys), -1, np.int32), np.zeros(len(keys), np.uint32)
        return {"key": keys, "last": last, "count": count}, np.arange(len(keys))
    positions = np.flatnonzero(values["last"])
    own = {name: values[name][positions, 0] for name in ("key", "last", "count")}
    last = own["last"].astype(np.int64) - num_steps - 1
    # 0 means no key: a commit after a look ahead has keys of one step more.
    return own | {"last": np.clip(last, np.iinfo(np.int32).min, -1).astype(np.int32)}, positions


def _buckets_with_keys(source: TableFiles, table: Table) -> Sequence[int]:
    """The buckets of a commit that may hold keys of the buckets held here."""
    if not source.is_dynamic:
        return range(source.num_buckets)
    cuts = [Cut(table.spec.layout.num_buckets, int(bucket)) for bucket in table.buckets]
    return sorted({bucket for cut in cuts for bucket in partners(cut, source.num_buckets)})


def read_buckets(
    store: Store,
    source: TableFiles,
    *,
    num_buckets: int,
    num_rows: int | None = None,
    out: Mapping[int, Sequence[np.ndarray]],
    with_slots: bool = True,
    on_chunk: Callable[[], None] = lambda: None,
) -> None:
    """Fills buckets of a table that is cut into `num_buckets` from a commit that cut it into any other number.

    Each file of the commit is read once, verified, and kept only while it is copied. Padding positions are not touched.

    Args:
      source: source of the commit; with slots, the same arrays as the table that begins.
      num_buckets: number of buckets of the table that begins; a power of two.
      num_rows: number of rows of that table, at least as many as the source has, which stands for None. The others are
        not touched.
      out: bucket → its arrays in the order of `source.arrays`, each `[rows per bucket, width]`; the rows alone without
        slots.
      on_chunk: called after each bucket of the commit.

    Raises:
      ChunkDamaged: a file is not what was committed; buckets may then be partly filled.
      ValueError: an array of `out` has another shape.
    """
    arrays = source.arrays if with_slots else source.arrays[:1]
    _check_out(source, [array.width for array in arrays], num_buckets, num_rows or source.num_rows, out)
    wanted: dict[int, list[int]] = {}
    for bucket in sorted(out):
        for source_bucket in partners(Cut(num_buckets, bucket), source.num_buckets):
            wanted.setdefault(source_bucket, []).append(bucket)
    for source_bucket, buckets in sorted(wanted.items()):
        if with_slots:
            values = read_bucket(store, source, source_bucket)
        else:
            # The digest of a bucket joins rows and slots; of the rows alone the file's own checksum is known.
            values = [read_bucket_array(store, source, arrays[0], source_bucket)]
        for bucket in buckets:
            shared = overlap(Cut(num_buckets, bucket), Cut(source.num_buckets, source_bucket), num_rows=source.num_rows)
            for target, value in zip(out[bucket], values, strict=True):
                target[shared.one] = value[shared.other]
        on_chunk()


def _check_out(
    source: TableFiles, widths: Sequence[int], num_buckets: int, num_rows: int, out: Mapping[int, Sequence[np.ndarray]]
) -> None:
    if num_buckets < 1 or num_buckets & (num_buckets - 1):
        raise ValueError(
            f"Found {num_buckets} buckets for table '{source.name}'. Expected a power of two. Take the number of the "
            "new run's record."
        )
    layout = BucketLayout(num_rows=num_rows, num_buckets=num_buckets)
    expected = [(layout.rows_per_bucket, width) for width in widths]
    for bucket, arrays in out.items():
        shapes = [array.shape for array in arrays]
        if not 0 <= bucket < num_buckets or shapes != expected:
            raise ValueError(
                f"Found bucket {bucket} with arrays {shapes} for table '{source.name}'. Expected a bucket below "
                f"{num_buckets} with {expected}. Pass rows, then the slots, of the buckets held here."
            )
