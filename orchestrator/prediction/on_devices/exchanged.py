"""What tables on devices hold there, and what devices exchange for them. Functions of their arguments alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from podembed.embedding.costs.profile import TableProfile
from podembed.workers.job.job import JobConfig
from podembed.workers.job.on_devices.declared import device_tables, weighted_features
from podembed.workers.job.on_devices.rooms import level_for, room_at

_WORD_BYTES = 4


def ids_per_bag(job: JobConfig, profiles: Sequence[TableProfile]) -> Mapping[str, float]:
    """By feature the mean length of its bags.

    Args:
      profiles: one a table.
    """
    found = {}
    for table, profile in zip(job.tables, profiles, strict=True):
        names = [name for name, feature in job.features.items() if feature.table is table]
        for name, ids in zip(names, profile.ids_per_sample, strict=True):
            found[name] = ids / _bags_per_sample(job, name)
    return found


def exchanged_bytes(job: JobConfig, lengths: Mapping[str, float]) -> float:
    """What devices exchange in a step for the tables that they hold, as the bytes of a sum over all devices.

    Of a table with fewer rows than bags, the sums of all rows are added up. Of others, all devices get the ids and
    gradients of all. That is half the way of a sum.

    Args:
      lengths: by feature the mean length of its bags.
    """
    found, weighted = 0.0, weighted_features(job)
    for table in device_tables(job):
        spec = table.spec
        if spec.optimizer is None:
            continue
        bags = {name: job.batch_size * _bags_per_sample(job, name) for name in table.features}
        if spec.optimizer.touches_all_rows or spec.num_rows <= sum(bags.values()):
            found += _WORD_BYTES * spec.num_rows * (spec.dim + 1)
            continue
        for name, count in bags.items():
            room = room_at(level_for(math.ceil(lengths.get(name, 1.0)))) * (2 if name in weighted else 1)
            found += _WORD_BYTES * count * (spec.dim + room) / 2
    return found


def _bags_per_sample(job: JobConfig, name: str) -> int:
    return math.prod(job.activation_shapes[name][:-1])


def device_sizes(job: JobConfig) -> Mapping[str, int]:
    """By table, the bytes of its rows and slots on a device."""
    return {
        name: table.vocabulary_size
        * ((table.optimizer or job.optimizer).row_bytes(table.dim) if table.trainable else _WORD_BYTES * table.dim)
        for name, table in zip(job.table_names, job.tables, strict=True)
    }
