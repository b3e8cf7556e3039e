"""From a job's declaration to the values that the lookup works with.

A table becomes a `TableSpec`, a feature a `FeatureBinding`, and the ids of a batch become the bags that are looked up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from podembed.embedding.buckets import within_reason
from podembed.embedding.config import QuantizationConfig, TableConfig
from podembed.embedding.features.id_policies import fit_ids
from podembed.embedding.lookup.placement import Chosen, buckets_for_work
from podembed.embedding.lookup.pooling_choice import CutWay, cut_way, why_not_pooled
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.optimizers import learning_rate_at
from podembed.embedding.ragged import Ragged, by_position
from podembed.embedding.shards import fewest_buckets
from podembed.embedding.table_spec import TableSpec
from podembed.workers.formats.rows_file import RowsOfFile
from podembed.workers.job.feature_shapes import keeps_positions
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import cut_to


def choose_buckets(job: JobConfig) -> tuple[int, ...]:
    """The number of buckets of each table of a new run, fixed for its life. It follows from the size, and from the work
    for all hosts if the run had one for each lane.
    """
    features = features_per_table(job)
    wanted = tuple(
        max(
            spec.layout.num_buckets,
            buckets_for_work(
                num_rows=spec.num_rows,
                num_features=count,
                all_features=sum(features),
                most_hosts=job.num_lanes,
            ),
            # One with place='auto' may be cut over devices by another start of the run.
            fewest_buckets(spec.num_rows) if spec.is_sharded or table.place == "auto" else 1,
        )
        for spec, table, count in zip(table_specs(job, (None,) * len(job.tables)), job.tables, features, strict=True)
    )
    return within_reason(wanted)


def table_specs(job: JobConfig, table_buckets: Sequence[int | None]) -> tuple[TableSpec, ...]:
    """All tables of a job, in the order of `job.tables`.

    Args:
      table_buckets: number of buckets of each, as recorded with the run; None chooses by size and lanes.
    """
    specs = []
    for name, table, num_buckets in zip(job.table_names, job.tables, table_buckets, strict=True):
        spec = TableSpec.of(
            table,
            seed=job.seed,
            name=name,
            optimizer=job.optimizer,
            num_buckets=num_buckets,
            most_hosts=job.num_lanes,
        )
        if spec.optimizer is not None:
            spec = replace(spec, optimizer=spec.optimizer.with_accumulator(job.initial_accumulator_value))
        if table.initial_rows_path is not None:
            spec = replace(spec, initializer=RowsOfFile(table.initial_rows_path, name))
        specs.append(spec)
    return tuple(specs)


def takes_accumulator(job: JobConfig) -> bool:
    """Whether a table begins with `JobConfig.initial_accumulator_value`."""
    optimizers = [table.optimizer or job.optimizer for table in job.tables if table.trainable]
    return any(one.with_accumulator(job.initial_accumulator_value) is not one for one in optimizers)


def check_initial_rows(job: JobConfig) -> None:
    """Looks at the files with the first values of tables.

    Raises:
      InputError: one is not there, or does not have the rows of its table.
    """
    for spec in table_specs(job, (None,) * len(job.tables)):
        if isinstance(spec.initializer, RowsOfFile):
            spec.initializer.check(num_rows=spec.num_rows, dim=spec.dim)


def feature_bindings(job: JobConfig) -> tuple[FeatureBinding, ...]:
    """All features, in the job's order; their activations lie side by side in that order."""
    position = {id(table): at for at, table in enumerate(job.tables)}
    bindings, column = [], 0
    for name, feature in job.features.items():
        combiner = feature.combiner or feature.table.combiner
        bindings.append(FeatureBinding(name=name, table=position[id(feature.table)], combiner=combiner, column=column))
        column += feature.table.dim
    return tuple(bindings)


def needs_rows(job: JobConfig) -> tuple[bool, ...]:
    """Per table, whether its rows must come to the samples as they are, whatever its optimizer."""
    return tuple(why is not None for why in why_rows(job))


def why_rows(job: JobConfig) -> tuple[str | None, ...]:
    """Per table, why its rows must come to the samples as they are; None if they need not.

    They are rounded before they are combined, or stay apart as a sequence.
    """
    apart = {
        id(job.features[name].table)
        for name, shape in job.activation_shapes.items()
        if len(shape) > 1 or job.features[name].is_sequence
    }
    return tuple(
        "a sequence keeps its rows apart"
        if id(table) in apart
        else "its rows are quantized before they are combined"
        if table.quantization_config is not None
        else None
        for table in job.tables
    )


def cut_ways(
    job: JobConfig,
    specs: Sequence[TableSpec],
    lengths: Sequence[float | None],
    *,
    num_hosts: int,
    chosen: Sequence[Chosen] | None = None,
) -> list[CutWay]:
    """Per table, how it is looked up where it is cut: the same on every host, and after every restart on as many.

    Args:
      specs: the job's tables.
      lengths: per feature, as `workers.input.lengths.bag_lengths` finds them.
      chosen: one a table, where costs decide instead of lengths. What must travel does so all the same.
    """
    if chosen is not None:
        whys = [why or why_not_pooled(spec) for spec, why in zip(specs, why_rows(job), strict=True)]
        return [
            CutWay(is_pooled=False, reason=f"{why}, so rows travel")
            if why is not None
            else CutWay(is_pooled=one.pools, reason="its owners pool" if one.pools else "rows travel")
            for why, one in zip(whys, chosen, strict=True)
        ]
    tables = [feature.table for feature in feature_bindings(job)]
    return [
        cut_way(
            spec,
            lengths=[length for table, length in zip(tables, lengths, strict=True) if table == at],
            num_bags=-(-job.batch_size // num_hosts),
            num_hosts=num_hosts,
            why_rows=why,
        )
        for at, (spec, why) in enumerate(zip(specs, why_rows(job), strict=True))
    ]


def features_per_table(job: JobConfig) -> tuple[int, ...]:
    """How many features look up in each table, in the order of `job.tables`."""
    bound = [feature.table for feature in feature_bindings(job)]
    return tuple(bound.count(at) for at in range(len(job.tables)))


def host_features_per_table(job: JobConfig) -> tuple[int, ...]:
    """The same of those that hosts look up. A table on the devices has none: its owners only keep what was committed,
    so it gives them no work.
    """
    counts = features_per_table(job)
    return tuple(0 if table.is_on_devices else count for table, count in zip(job.tables, counts, strict=True))


def learning_rates(
    specs: Sequence[TableSpec], step: int, schedule: Callable[[int], float] | None = None
) -> list[float]:
    """The learning rate of each table in a step; 0 where it has no optimizer.

    Args:
      schedule: schedule as `JobConfig.schedule`.
    """
    factor = 1.0 if schedule is None else learning_rate_at(schedule, step)
    return [0.0 if s.optimizer is None else factor * learning_rate_at(s.optimizer.learning_rate, step) for s in specs]


class Bags:
    """The bags of a job's batches, as `TPUEmbedding.enqueue` makes them. Mutated: the counts of altered ids.

    Rows of sequences are cut by position first. Then ids outside a vocabulary are dropped, clipped or hashed, as their
    table says. A dropped id therefore leaves its position empty. Most features need neither and pass through.
    """

    def __init__(self, job: JobConfig) -> None:
        # Per feature its table's number, its table, and the positions a sample is cut into; 0 for none.
        self._rules: dict[str, tuple[int, TableConfig, int]] = {}
        self._sequences = job.sequences
        numbers = {id(table): at for at, table in enumerate(job.tables)}
        for name, feature in job.features.items():
            inner = job.activation_shapes[name][:-1]
            positions = math.prod(inner) if keeps_positions(feature, inner) else 0
            if positions or feature.table.invalid_ids != "error":
                self._rules[name] = numbers[id(feature.table)], feature.table, positions
        self._altered = np.zeros(len(job.tables), np.int64)

    def of(self, features: Mapping[str, Ragged], *, counted: Collection[str] | None = None) -> Mapping[str, Ragged]:
        """Bags by feature, one for each vector that the lookup shall return. Those of a sequence are the positions that
        there are: where they go is known once all hosts have said how many they have.

        Args:
          counted: the features whose altered ids count; None for all. Others come again with ids that were counted.
        """
        if not self._rules:
            return features
        return {
            name: self._bags(name, rows, counts=counted is None or name in counted) for name, rows in features.items()
        }

    def lengths(self, name: str, rows: Ragged) -> np.ndarray:
        """Positions that the samples of a sequence have, `[num_samples]`. One whose id was dropped counts."""
        return np.minimum(np.diff(rows.row_splits), self._sequences[name])

    def positions(self, name: str) -> int:
        """Into how many bags a sample of a feature is cut; 0 where it is one bag."""
        return self._rules[name][2] if name in self._rules else 0

    def take_altered(self) -> tuple[int, ...]:
        """Per table, how many ids were dropped, clipped or hashed since the last call."""
        counts, self._altered = self._altered, np.zeros_like(self._altered)
        return tuple(int(count) for count in counts)

    def _bags(self, name: str, rows: Ragged, *, counts: bool) -> Ragged:
        if name not in self._rules:
            return rows
        number, table, positions = self._rules[name]
        if name in self._sequences:
            bags = cut_to(rows, positions)
        else:
            bags = by_position(rows, positions) if positions else rows
        if table.invalid_ids != "error":
            bags, count = fit_ids(name, bags, table)
            self._altered[number] += count if counts else 0
        return bags


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """A table on the devices.

    Attributes:
      at: its position among all tables of the job.
      spec: description of the table.
      quantization: how vectors are rounded, or None.
      features: features that look up in it, in the job's order.
    """

    at: int
    spec: TableSpec
    quantization: QuantizationConfig | None
    features: tuple[str, ...]


def device_tables(job: JobConfig, table_buckets: Sequence[int | None] = ()) -> tuple[DeviceTable, ...]:
    """The tables that live on devices, in the job's order.

    Args:
      table_buckets: table buckets as recorded with the run; empty for those of a new run.
    """
    return tuple(
        DeviceTable(
            at=at,
            spec=spec,
            quantization=config.quantization_config,
            features=tuple(name for name, feature in job.features.items() if feature.table is config),
        )
        for at, (spec, config) in enumerate(
            zip(table_specs(job, table_buckets or choose_buckets(job)), job.tables, strict=True)
        )
        if config.is_on_devices
    )


def weighted_features(job: JobConfig) -> frozenset[str]:
    """The features on devices whose ids have weights."""
    columns = job.resolved_data.id_columns if job.device_features else {}
    return frozenset(name for name in job.device_features if columns[name].weights is not None)


def has_weighted_ids(job: JobConfig) -> bool:
    """Whether ids of a feature have weights, as far as the declarations of the data say."""
    return any(column.weights is not None for column in job.resolved_data.id_columns.values())
