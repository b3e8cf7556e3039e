"""A feature configuration taken apart: its features in flat order, their tables in the order of first use, defaults
filled in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.device_places import DeviceRoom, auto_places, problem_on_devices
from podembed.embedding.features.id_policies import shown_path
from podembed.embedding.optimizers import ROW_OPTIMIZERS, SGD, Optimizer
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.features.structures import flatten_with_paths, pack_like
from podembed.embedding.tf.tpu_config.learning_rate_tags import TaggedLearningRate


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTables:
    """What a feature configuration declares.

    Attributes:
      structure: the configuration as it was given.
      paths: paths of the features, in flat order.
      features: in flat order.
      tables: each once, by identity, in the order in which the features first use them.
      table_numbers: per feature, the position of its table.
    """

    structure: Any
    paths: tuple[str, ...]
    features: tuple[FeatureConfig, ...]
    tables: tuple[TableConfig, ...]
    table_numbers: tuple[int, ...]

    @staticmethod
    def of(feature_config: Any, optimizer: Optimizer | None, *, needs_optimizer: bool) -> DeclaredTables:
        """Takes a configuration apart and writes defaults into its tables: the global optimizer, and names by position.

        Raises:
          ValueError: a leaf is no feature, a table has an unsupported optimizer, or two tables have one name.
        """
        leaves = flatten_with_paths(feature_config)
        for path, leaf in leaves:
            if not isinstance(leaf, FeatureConfig):
                raise ValueError(
                    f"Found {leaf!r} at {shown_path(path)} of feature_config. Expected a FeatureConfig, or dicts, "
                    "lists and tuples of them. Build a FeatureConfig."
                )
        features = tuple(leaf for _, leaf in leaves)
        tables = tuple({id(feature.table): feature.table for feature in features}.values())
        names: list[str] = []
        for at, table in enumerate(tables):
            _fill_in(table, at, optimizer, needs_optimizer=needs_optimizer)
            if table.name in names:
                raise ValueError(
                    f"Tables must have a unique name. Multiple tables with name {table.name} found. Expected one name "
                    "each. Rename one, or use one TableConfig object where features share a table."
                )
            names.append(str(table.name))
        number = {id(table): at for at, table in enumerate(tables)}
        return DeclaredTables(
            structure=feature_config,
            paths=tuple(path for path, _ in leaves),
            features=features,
            tables=tables,
            table_numbers=tuple(number[id(feature.table)] for feature in features),
        )

    def place(self, room: Callable[[], DeviceRoom | str]) -> None:
        """Writes a place into each table with place='auto'.

        Args:
          room: asks for the devices of this process, as for `auto_places`. Not called where no table waits.
        """
        waiting = {str(table.name): table for table in self.tables if table.place == "auto"}
        if not waiting:
            return
        # With an optimizer of its own each, or none that could be refused.
        default = next((table.optimizer for table in self.tables if table.optimizer is not None), SGD())
        for name, chosen in auto_places({str(one.name): one for one in self.tables}, default, room()).items():
            waiting[name].place, waiting[name].place_reason = chosen

    def with_default_optimizer(self, optimizer: Optimizer | None) -> DeclaredTables:
        """The same with this optimizer for the tables that declare none, also where another embedding has written its
        own into them.
        """
        if optimizer is None:
            return self
        tables = [copy.copy(table) for table in self.tables]
        for table in tables:
            if table.has_default_optimizer:
                table.optimizer = optimizer
        return replace(self, tables=tuple(tables))

    def for_replicas(self, initializer: Callable[..., Any], rate_tags: Sequence[int | None]) -> DeclaredTables:
        """The same with this initializer in place of the tables' own, which may be slow to pack, and without the
        callables of learning rates, of which a copy would be another rate.

        Args:
          rate_tags: learning-rate tags of the tables; those of one tag go on sharing a rate.
        """
        rates = {tag: TaggedLearningRate(tag) for tag in rate_tags if tag is not None}
        tables: dict[int, TableConfig] = {}
        features: dict[int, FeatureConfig] = {}
        for table, tag in zip(self.tables, rate_tags, strict=True):
            own = tables[id(table)] = copy.copy(table)
            own.initializer = initializer
            if tag is not None and own.optimizer is not None:
                own.optimizer = replace(own.optimizer, learning_rate=rates[tag])  # pyright: ignore[reportArgumentType]
        for feature in self.features:
            copied = features[id(feature)] = copy.copy(feature)
            copied.table = tables[id(feature.table)]
        flat = [features[id(feature)] for feature in self.features]
        return replace(
            self,
            structure=pack_like(self.structure, flat),
            features=tuple(flat),
            tables=tuple(tables.values()),
        )

    def specs(self, *, seed: int) -> tuple[TableSpec, ...]:
        """The tables as engines hold them."""
        # What saves them writes a file a bucket, so large tables are cut as for few hosts.
        return tuple(TableSpec.of(table, seed=seed, most_hosts=1) for table in self.tables)


def _fill_in(table: TableConfig, at: int, optimizer: Optimizer | None, *, needs_optimizer: bool) -> None:
    _refuse_what_trainers_take(table, at)
    if table.optimizer is None:
        table.optimizer = optimizer
        table.has_default_optimizer = True
    if (table.optimizer is not None or needs_optimizer) and not isinstance(table.optimizer, Optimizer):
        raise ValueError(
            f"{type(table.optimizer)} is an unsupported optimizer class. Expected one of podembed.embedding for table "
            f"'{table.name or f'table_{at}'}'. Pass one of {', '.join(rule.__name__ for rule in ROW_OPTIMIZERS)}."
        )
    if table.name is None:
        table.name = f"table_{at}"
    if table.is_sharded and table.optimizer is not None:
        problem = problem_on_devices(table, table.optimizer)
        if problem is not None:
            raise ValueError(problem)


def _refuse_what_trainers_take(table: TableConfig, at: int) -> None:
    name = table.name or f"table_{at}"
    if not table.trainable:
        raise ValueError(
            f"Found table '{name}' with trainable=False. Expected tables that train, since `apply_gradients` takes "
            "gradients of all. Pass optimizer=SGD(0.0), or train with a Trainer."
        )
    if table.is_on_devices and not table.is_sharded:
        raise ValueError(
            f"Found table '{name}' with place={table.place!r}. Expected 'host' or 'sharded', the places for "
            "a TPUEmbedding. Say place='sharded', leave it out, or train with a Trainer."
        )
    if table.initial_rows_path is not None:
        raise ValueError(
            f"Found initial_rows={table.initial_rows_path!r} of table '{name}'. Expected an array, since a "
            "TPUEmbedding reads no data files. Pass numpy.load(path, mmap_mode='r'), or train with a Trainer."
        )
