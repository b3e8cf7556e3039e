"""Runs with versions, for tests of servers."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.orchestrator.run.reference import open_commit
from podembed.serving.artifact.exported_model import scores_among
from podembed.serving.predict.predict import predict
from podembed.serving.server.replica import Replica
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import Store


def listed(table: pa.Table) -> dict[str, list[Any]]:
    """Columns as a client sends them in JSON: times as text."""

    def plain(value: Any) -> Any:
        return value.isoformat() if isinstance(value, datetime.datetime) else value

    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return json.loads(
        json.dumps(
            {
                name: [[plain(one) for one in value] if isinstance(value, list) else plain(value) for value in values]
                for name, values in columns.items()
            }
        )
    )


def data_table(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])


def predicted(run: str, job: JobConfig, data: Path, out: Path, *, commit: str | None = None) -> np.ndarray:
    """The scores of `podembed predict` of a commit."""
    predict(run, job=job, data=[str(data)], out=str(out), commit=commit, force=True)
    found = pq.read_table(out)
    name = "scores" if "scores" in found.column_names else "score"
    return np.array(found.column(name).to_pylist(), np.float32)


def scored(replica: Replica, columns: dict[str, list[Any]]) -> np.ndarray:
    """The scores of the version that answers."""
    with replica.use() as version:
        # As the server does: on some processors a larger run has other bits.
        samples = version.model.read(columns, with_context=True)
        outputs = version.model.score_whole(samples, version.most_samples)
    return np.asarray(scores_among(outputs))


def part(columns: dict[str, list[Any]], start: int, stop: int) -> dict[str, list[Any]]:
    return {name: values[start:stop] for name, values in columns.items()}


def newest_commit(run: str) -> str:
    return open_commit(run).manifest.name


def store_of(run: str) -> Store:
    return Store(run)
