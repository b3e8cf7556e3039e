from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.buckets import split_evenly
from podembed.workers.columns.decode import Decoder
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DataConfigError
from podembed.workers.data.config import ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.input_files import InputFile
from podembed.workers.formats.parquet import OpenedParquet
from podembed.workers.input import reader as input_module
from podembed.workers.input.index import InputIndex, build_index, describe_order
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.reader import InputReader, evaluation_plan, training_plan
from tests.batches import joined
from tests.long_tests import examples
from tests.workers.formats.parquet_sets import assert_same, check_rows, table_of, write_set


def read_whole(data: ParquetData, index: InputIndex, plan: LanePlan, num_hosts: int, steps: range) -> list[Batch]:
    """The global batch of every step, put together from the hosts' parts."""
    readers = [InputReader(data, index, plan, lanes) for lanes in split_evenly(plan.num_lanes, num_hosts)]
    batches = [joined([reader.read(step) for reader in readers]) for step in steps]
    for reader in readers:
        reader.close()
    return batches


@settings(deadline=None, max_examples=examples(15))
@given(
    rows_per_file=st.lists(st.integers(0, 23), min_size=1, max_size=4).filter(sum),
    rows_per_group=st.integers(1, 9),
    num_lanes=st.integers(1, 6),
    per_step=st.integers(1, 5),
    window_rows=st.integers(1, 60),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
    is_striped=st.booleans(),
    data=st.data(),
)
def test_every_sample_once_an_epoch_in_the_same_batches_for_any_hosts(
    rows_per_file, rows_per_group, num_lanes, per_step, window_rows, seed, shuffle, is_striped, data
) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.object(input_module, "WINDOW_ROWS", window_rows):
        declared = write_set(Path(folder), rows_per_file, rows_per_group=rows_per_group)
        index = build_index(declared)
        plan = LanePlan(
            row_group_rows=index.row_group_rows,
            num_lanes=num_lanes,
            batch_size=num_lanes * per_step,
            seed=seed,
            shuffle=shuffle,
            is_striped=is_striped,
        )
        num_steps = 2 * plan.steps_per_epoch
        whole = read_whole(declared, index, plan, 1, range(num_steps))
        for epoch in range(2):
            steps = whole[epoch * plan.steps_per_epoch : (epoch + 1) * plan.steps_per_epoch]
            read = np.concatenate([batch.sample_ids for batch in steps])
            assert sorted(read[read >= 0].tolist()) == list(range(sum(rows_per_file)))
            if is_striped and not shuffle:
                assert read[read >= 0].tolist() == list(range(sum(rows_per_file))), "not in the order of the files"
        counts = [0, *np.cumsum([int((batch.sample_ids >= 0).sum()) for batch in whole]).tolist()]
        assert [plan.rows_before(step) for step in range(num_steps + 1)] == counts
        for batch in whole:
            assert batch.num_samples == plan.batch_size
            check_rows(batch)
        # Another number of hosts, entering anywhere: the same global batches.
        cut = data.draw(st.integers(0, num_steps - 1))
        num_hosts = data.draw(st.integers(1, num_lanes))
        for resumed, uncut in zip(
            read_whole(declared, index, plan, num_hosts, range(cut, num_steps)), whole[cut:], strict=True
        ):
            assert_same(resumed, uncut)


def test_steps_can_be_read_in_any_order(tmp_path: Path) -> None:
    data = write_set(tmp_path, [40, 30], rows_per_group=8)
    index = build_index(data)
    plan = training_plan(index, num_lanes=4, batch_size=12, seed=5)
    steps = range(3 * plan.steps_per_epoch)
    reader = InputReader(data, index, plan, [2, 0])
    in_order = [reader.read(step) for step in steps]
    jumping = InputReader(data, index, plan, [2, 0])
    for step in np.random.default_rng(0).permutation(len(steps)).tolist():
        assert_same(jumping.read(step), in_order[step])
    assert reader.num_samples == 6


def test_epochs_differ_and_lanes_come_in_the_order_asked_for(tmp_path: Path) -> None:
    data = write_set(tmp_path, [64], rows_per_group=8)
    index = build_index(data)
    plan = training_plan(index, num_lanes=2, batch_size=16, seed=5)
    forward = InputReader(data, index, plan, [0, 1])
    backward = InputReader(data, index, plan, [1, 0])
    first = forward.read(0)
    assert first.sample_ids.tolist() != forward.read(plan.steps_per_epoch).sample_ids.tolist()
    swapped = backward.read(0)
    assert_same(joined([swapped.slice(8, 16), swapped.slice(0, 8)]), first)


def test_rows_are_shuffled_within_their_row_group(tmp_path: Path) -> None:
    data = write_set(tmp_path, [1000], rows_per_group=500)
    index = build_index(data)
    reader = InputReader(data, index, training_plan(index, num_lanes=1, batch_size=500, seed=1), [0])
    numbers = reader.read(0).sample_ids
    assert len(set(numbers // 500)) == 1
    moved = np.abs(np.diff(numbers))
    assert 120 < moved.mean() < 220  # a third of the window, where reading in order gives 1


def test_evaluation_reads_everything_once_in_file_order(tmp_path: Path) -> None:
    data = write_set(tmp_path, [7, 4], rows_per_group=3)
    index = build_index(data)
    plan = evaluation_plan(index, num_lanes=1, batch_size=4)
    numbers = np.concatenate(
        [InputReader(data, index, plan, [0]).read(step).sample_ids for step in range(plan.steps_per_epoch)]
    )
    assert numbers.tolist() == [*range(11), -1]


def test_in_the_order_of_the_files_each_step_has_the_next_rows_over_all_hosts(tmp_path: Path) -> None:
    data = write_set(tmp_path, [7, 0, 9, 4], rows_per_group=3)
    index = build_index(data)
    plan = training_plan(index, num_lanes=3, batch_size=6, seed=5, order="files")
    assert plan.steps_per_epoch == 4
    hosts = [InputReader(data, index, plan, lanes) for lanes in ([0, 1], [2])]
    for epoch in range(2):
        steps = [[host.read(4 * epoch + step).sample_ids.tolist() for host in hosts] for step in range(4)]
        assert steps == [
            [[0, 1, 2, 3], [4, 5]],
            [[6, 7, 8, 9], [10, 11]],
            [[12, 13, 14, 15], [16, 17]],
            [[18, 19, -1, -1], [-1, -1]],
        ]


def test_in_the_order_of_the_files_a_host_decodes_each_row_group_once_and_its_own_rows_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_module, "WINDOW_ROWS", 24)
    data = write_set(tmp_path, [60, 60], rows_per_group=10)
    index = build_index(data)
    plan = training_plan(index, num_lanes=4, batch_size=12, seed=5, order="files")
    read: list[int] = []
    read_group = OpenedParquet.read
    monkeypatch.setattr(
        OpenedParquet,
        "read",
        lambda self, group, decoder: read.append(group.first_position) or read_group(self, group, decoder),
    )
    decoded: list[int] = []
    decode = Decoder.decode
    monkeypatch.setattr(
        Decoder, "decode", lambda self, raw, **given: decoded.append(len(given["order"])) or decode(self, raw, **given)
    )
    reader = InputReader(data, index, plan, [0, 1])
    for step in range(plan.steps_per_epoch):
        reader.read(step)
        assert len(reader._kept) <= 4, "more row groups are kept than a window touches"
    assert read == list(range(0, 120, 10))
    assert sum(decoded) == 60


def test_the_order_of_the_files_is_said_and_numbers_without_leading_zeros_are_pointed_out() -> None:
    def said(*names: str) -> str:
        return describe_order(
            [InputFile(path=f"/data/{name}", size_bytes=1, version="1", row_group_rows=(1,)) for name in names]
        )

    assert said("day_01.csv", "day_02.csv", "day_10.csv") == (
        "samples in the order of the files: day_01.csv, day_02.csv, day_10.csv"
    )
    assert "a, b, c, d, ..., g" not in said(*"abcd")
    assert "a, b, c, d, ..., g" in said(*"abcdefg")
    assert "leading zeros" in said("day_1.csv", "day_10.csv", "day_2.csv")


def test_a_host_without_lanes_reads_empty_batches(tmp_path: Path) -> None:
    data = write_set(tmp_path, [7], rows_per_group=3)
    index = build_index(data)
    batch = InputReader(data, index, training_plan(index, num_lanes=1, batch_size=4, seed=0), []).read(1)
    assert batch.num_samples == 0
    assert list(batch.features) == ["item", "user", "history"]
    assert batch.dense.shape == (0, 2)


def test_reading_on_decodes_every_row_group_once(tmp_path: Path) -> None:
    data = write_set(tmp_path, [60, 60], rows_per_group=10)
    index = build_index(data)
    plan = training_plan(index, num_lanes=3, batch_size=6, seed=1)
    with (
        patch.object(OpenedParquet, "read", autospec=True, side_effect=OpenedParquet.read) as read,
        patch.object(input_module, "WINDOW_ROWS", 24),
    ):
        reader = InputReader(data, index, plan, range(3))
        for step in range(plan.steps_per_epoch):
            reader.read(step)
    assert read.call_count == len(index.row_group_rows)


def test_more_files_than_may_be_open_at_once(tmp_path: Path) -> None:
    data = write_set(tmp_path, [3] * 9, rows_per_group=2)
    index = build_index(data)
    plan = training_plan(index, num_lanes=4, batch_size=4, seed=1)
    with patch.object(input_module, "MAX_OPEN_FILES", 2):
        (batches,) = [read_whole(data, index, plan, 1, range(plan.steps_per_epoch))]
    numbers = np.concatenate([batch.sample_ids for batch in batches])
    assert sorted(numbers[numbers >= 0].tolist()) == list(range(27))


def test_a_file_that_changed_after_the_index_is_refused(tmp_path: Path) -> None:
    data = write_set(tmp_path, [4, 4], rows_per_group=2)
    index = build_index(data)
    pq.write_table(table_of(range(5)), tmp_path / "part-001.parquet", row_group_size=2)
    reader = InputReader(data, index, evaluation_plan(index, num_lanes=1, batch_size=2), [0])
    with pytest.raises(InputError, match=r"Found .*part-001.parquet with"):
        reader.read(0)  # a window of steps, into the second file


def test_a_damaged_page_is_named(tmp_path: Path) -> None:
    data = write_set(tmp_path, [4000], rows_per_group=1000)
    path = tmp_path / "part-000.parquet"
    content = bytearray(path.read_bytes())
    footer = pq.ParquetFile(path).metadata.row_group(2).column(0)
    start = footer.dictionary_page_offset or footer.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    index = build_index(data)
    reader = InputReader(data, index, evaluation_plan(index, num_lanes=1, batch_size=1000), [0])
    with patch.object(input_module, "WINDOW_ROWS", 1000):
        check_rows(reader.read(1))
        with pytest.raises(InputError, match=r"row group 2 of .*part-000.parquet unreadable"):
            reader.read(2)
        check_rows(reader.read(3))


def test_a_refused_value_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    data = write_set(tmp_path, [10], rows_per_group=4)
    table = table_of(range(10))
    table = table.set_column(table.column_names.index("item"), "item", pa.array([*range(9), -3]))
    pq.write_table(table, tmp_path / "part-000.parquet", row_group_size=4)
    index = build_index(data)
    reader = InputReader(data, index, training_plan(index, num_lanes=1, batch_size=10, seed=0), [0])
    with pytest.raises(InputError, match=r"Found id -3 in .*part-000.parquet, row group 2, row 9, column 'item'"):
        reader.read(0)


def test_a_reader_of_a_foreign_plan_or_lane_is_refused(tmp_path: Path) -> None:
    data = write_set(tmp_path, [10], rows_per_group=4)
    index = build_index(data)
    plan = training_plan(index, num_lanes=2, batch_size=4, seed=0)
    with pytest.raises(DataConfigError, match="lane 2"):
        InputReader(data, index, plan, [1, 2])
    with pytest.raises(InputError, match="Make the plan from this index"):
        InputReader(data, index, LanePlan(row_group_rows=(3,), num_lanes=1, batch_size=1), [0])


def test_a_closed_reader_reads_again(tmp_path: Path) -> None:
    data = write_set(tmp_path, [10], rows_per_group=4)
    index = build_index(data)
    reader = InputReader(data, index, training_plan(index, num_lanes=2, batch_size=4, seed=0), [0, 1])
    before = reader.read(1)
    reader.close()
    assert_same(reader.read(1), before)
