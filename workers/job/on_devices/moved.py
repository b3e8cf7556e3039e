"""A job with more of its tables on the devices, to see what that would take."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import replace

from podembed.embedding.config import TableConfig
from podembed.workers.job.job import JobConfig


def on_devices(job: JobConfig, names: Collection[str]) -> JobConfig:
    """The job with these tables on the devices. The job that is given stays as it is.

    Args:
      names: of tables, as `JobConfig.table_names` has them.

    Raises:
      JobError: one of them cannot be there.
    """
    if not names:
        return job
    moved: dict[int, TableConfig] = {}
    for name, table in zip(job.table_names, job.tables, strict=True):
        moved[id(table)] = table
        if name in names:
            moved[id(table)] = copy(table)
            moved[id(table)].place = "device"
    features = {}
    for name, feature in job.features.items():
        features[name] = copy(feature)
        features[name].table = moved[id(feature.table)]
    return replace(job, features=features)
