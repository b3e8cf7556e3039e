"""Order and completeness over all kinds of sources: every good row once an epoch, the same batches for any hosts, from
any step on.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.buckets import split_evenly
from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import CsvData, InputData, NpyData, ParquetData
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, evaluation_plan, training_plan
from tests.batches import joined
from tests.long_tests import examples
from tests.workers.formats.parquet_sets import assert_same

SIZE = 10_000


def write_files(folder: Path, kind: str, rows_per_file: list[int], bad: set[int], group: int) -> InputData:
    """Rows that name themselves by their one id; those in `bad` have no finite label."""
    first = 0
    for part, count in enumerate(rows_per_file):
        numbers = np.arange(first, first + count)
        labels = np.where(np.isin(numbers, list(bad)), np.nan, numbers % 2).astype(np.float32)
        first += count
        if kind == "npy":
            np.save(folder / f"{part}_labels.npy", labels)
            np.save(folder / f"{part}_dense.npy", numbers[:, None].astype(np.float32))
            np.save(folder / f"{part}_sparse.npy", numbers[:, None].astype(np.int32))
            continue
        table = pa.table({"label": labels, "int_0": numbers, "cat_0": numbers})
        if kind.startswith("csv"):
            with pa.output_stream(folder / f"{part}.{kind}", compression="gzip" if kind == "csv.gz" else None) as file:
                pa.csv.write_csv(table, file)
        else:
            pq.write_table(table, folder / f"{part}.parquet", row_group_size=group)
    declared = {
        "label": "label",
        "dense": ("int_0",),
        "features": {"id": IdColumn("cat_0", vocabulary_size=SIZE)},
        "max_bad_rows": len(bad),
    }
    match kind:
        case "csv" | "csv.gz":
            return CsvData(f"{folder}/*.{kind}", rows_per_block=group, **declared)
        case "npy":
            return NpyData(f"{folder}/*_labels.npy", rows_per_block=group, **declared)
        case _:
            return ParquetData(f"{folder}/*.parquet", **declared)


@settings(deadline=None, max_examples=examples(20))
@given(
    kind=st.sampled_from(["parquet", "csv", "csv.gz", "npy"]),
    rows_per_file=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    group=st.integers(1, 9),
    num_lanes=st.integers(1, 5),
    per_step=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    order=st.sampled_from(["shuffled", "files"]),
    data=st.data(),
)
def test_every_good_row_once_an_epoch_for_any_hosts(
    kind, rows_per_file, group, num_lanes, per_step, epochs, seed, order, data
) -> None:
    num_rows = sum(rows_per_file)
    bad = data.draw(st.sets(st.integers(0, num_rows - 1), max_size=4))
    good = sorted(set(range(num_rows)) - bad)
    with tempfile.TemporaryDirectory() as folder:
        declared = write_files(Path(folder), kind, rows_per_file, bad, group)
        index = build_index(declared)
        plan = training_plan(index, num_lanes=num_lanes, batch_size=num_lanes * per_step, seed=seed, order=order)
        steps = range(epochs * plan.steps_per_epoch)

        def read(num_hosts: int, first: int, stop: int) -> tuple[list[Batch], list[int]]:
            log = BadRowLog(declared.max_bad_rows)
            lanes = split_evenly(num_lanes, num_hosts)
            readers = [InputReader(declared, index, plan, part, bad_rows=log) for part in lanes]
            batches = [joined([reader.read(step) for reader in readers]) for step in steps[first:stop]]
            for reader in readers:
                reader.close()
            return batches, sorted(row.row for row in log.take())

        whole, left_out = read(1, 0, len(steps))
        assert len(left_out) == len(bad)
        for epoch in range(epochs):
            part = joined(whole[epoch * plan.steps_per_epoch : (epoch + 1) * plan.steps_per_epoch])
            rows = np.flatnonzero(~part.is_padding)
            read_ids = part.sample_ids[rows].tolist()
            assert (read_ids if order == "files" else sorted(read_ids)) == good
            assert [part.features["id"].to_lists()[row] for row in rows] == [[n] for n in part.sample_ids[rows]]
            assert (part.weights[part.is_padding] == 0).all()
            assert (part.weights[rows] == 1).all()
        # A life of starts and stops, each start with as many hosts as there happen to be: the lanes may not divide by
        # them.
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(steps) - 1)), max_size=4)) | {0, len(steps)})
        resumed: list[Batch] = []
        for first, stop in itertools.pairwise(cuts):
            resumed += read(data.draw(st.integers(1, num_lanes)), first, stop)[0]
        for left, right in zip(resumed, whole, strict=True):
            assert_same(left, right)
        evaluated = evaluation_plan(index, num_lanes=num_lanes, batch_size=num_lanes * per_step)
        num_read = []
        for part in split_evenly(num_lanes, data.draw(st.integers(1, num_lanes))):
            reader = InputReader(declared, index, evaluated, part)
            num_read += [reader.read(step).sample_ids for step in range(evaluated.steps_per_epoch)]
            reader.close()
        ids = np.concatenate(num_read)
        assert sorted(ids[ids >= 0].tolist()) == good


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz", "npy"])
def test_every_kind_gives_the_same_batches(tmp_path: Path, kind: str) -> None:
    """The same rows in the same groups: what a run computes does not depend on how its data is stored."""
    batches = []
    for name in ("parquet", kind):
        folder = tmp_path / f"as-{name}-{len(batches)}"
        folder.mkdir()
        declared = write_files(folder, name, [14, 9], {5}, 6)
        index = build_index(declared)
        plan = training_plan(index, num_lanes=2, batch_size=6, seed=3)
        reader = InputReader(declared, index, plan, range(2))
        batches.append([reader.read(step) for step in range(plan.steps_per_epoch)])
    for left, right in zip(*batches, strict=True):
        assert_same(left, right)
