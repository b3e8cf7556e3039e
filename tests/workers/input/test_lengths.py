"""What is known of the lengths of bags before anything is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from podembed.jobs.planning.data_at_hand import index_at_hand
from podembed.workers.data.config import CsvData, NpyData
from podembed.workers.input.index import InputIndex, build_index
from podembed.workers.input.lengths import bag_lengths
from tests.small_job import small_job


def test_a_footer_says_how_long_lists_are(tmp_path: Path) -> None:
    """An empty list counts as one value in a footer. Files count by their rows; an index that was recorded knows
    nothing of lists.
    """
    job = small_job(folder=str(tmp_path))
    names = list(job.features)
    for number, lists in enumerate(([[1, 2, 3], []], [[1] * 7] * 6)):
        columns = {
            source.column: pa.array([1] * len(lists) if at else lists)
            for at, source in enumerate(job.resolved_data.id_columns.values())
        }
        others = (job.data.label, *(column.name for column in job.data.dense_columns), job.data.sample_id)
        columns |= {name: pa.array([1] * len(lists)) for name in others if name}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    data = replace(job.data, paths=f"{tmp_path}/*.parquet", eval_paths=())
    job = replace(job, data=data)
    index = build_index(job.resolved_data)
    found = dict(zip(names, bag_lengths(job, index), strict=True))
    columns = {name: source.column for name, source in job.resolved_data.id_columns.items()}
    for name, length in found.items():
        assert length == ((4 + 42) / 8 if columns[name] == columns[names[0]] else 1.0)
    recorded = InputIndex.from_json(index.to_json())
    assert recorded == index
    assert bag_lengths(job, recorded)[0] is None
    assert bag_lengths(job, None) == (None,) * len(names)
    assert index_at_hand(job) == (index, None)
    found, problem = index_at_hand(replace(job, data=replace(data, paths=f"{tmp_path}/none/*.parquet")))
    assert found is None
    assert "none/*.parquet" in (problem or "")


def test_a_declaration_may_say_that_there_are_no_lists(tmp_path: Path) -> None:
    job = small_job(folder=str(tmp_path))
    features = {name: source.column for name, source in job.resolved_data.id_columns.items()}
    first = next(iter(features.values()))
    csv = CsvData(f"{tmp_path}/*.csv", label="label", features=features, list_separators={first: "|"})
    found = bag_lengths(replace(job, data=csv), None)
    assert found == tuple(None if column == first else 1.0 for column in features.values())
    assert bag_lengths(replace(job, data=NpyData(f"{tmp_path}/*labels.npy", features=features)), None) == (1.0,) * len(
        features
    )
