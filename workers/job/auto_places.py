"""Tables with place='auto', when the devices are known: where they are to lie, and a job in which they lie there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from podembed.embedding.device_places import AutoPlace, DeviceRoom, auto_places
from podembed.workers.job.job import JobConfig


def chosen_places(job: JobConfig, room: DeviceRoom | str) -> dict[str, AutoPlace]:
    """The places of a job's tables with place='auto'; `room` as for `auto_places`."""
    return auto_places(dict(zip(job.table_names, job.tables, strict=True)), job.optimizer, room)


def with_places(job: JobConfig, places: Mapping[str, AutoPlace]) -> JobConfig:
    """The job with tables of its own that lie so. Tables and features of the declaration stay as they are."""
    tables = {id(table): copy.copy(table) for table in job.tables}
    for name, declared in zip(job.table_names, job.tables, strict=True):
        table = tables[id(declared)]
        table.place, table.place_reason = places.get(name, (table.place, table.place_reason))
    features = {name: copy.copy(feature) for name, feature in job.features.items()}
    for feature in features.values():
        feature.table = tables[id(feature.table)]
    return replace(job, features=features)
