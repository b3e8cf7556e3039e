"""Which features a host looks up and which ones its devices, and the tables that cannot live on devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.table_spec import TableSpec
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import table_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """A table on the devices.

    Attributes:
      at: its position among all tables of the job.
      spec: description of the table; how it is cut into buckets is the business of hosts.
      config: as it was declared.
      features: features that look up in it, in the job's order.
    """

    at: int
    spec: TableSpec
    config: TableConfig
    features: Mapping[str, FeatureConfig]


def device_tables(job: JobConfig) -> tuple[DeviceTable, ...]:
    """The tables that live on devices, in the job's order."""
    return tuple(
        DeviceTable(
            at=at,
            spec=spec,
            config=config,
            features={name: feature for name, feature in job.features.items() if feature.table is config},
        )
        for at, (spec, config) in enumerate(zip(table_specs(job, (None,) * len(job.tables)), job.tables, strict=True))
        if config.is_on_devices
    )


def weighted_features(job: JobConfig) -> frozenset[str]:
    """The features on devices whose ids have weights."""
    columns = job.resolved_data.id_columns if job.device_features else {}
    return frozenset(name for name in job.device_features if columns[name].weights is not None)
