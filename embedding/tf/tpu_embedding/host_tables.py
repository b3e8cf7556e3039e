"""Whole tables in this process, as variables: what an embedding made outside any strategy holds, for export, evaluation
and serving.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.table.table import Table
from podembed.embedding.tf.engine.host_engine import whole_table
from podembed.embedding.tf.engine.table_storage import WrittenTables, storage
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.tpu_embedding.declared import DeclaredTables
from podembed.embedding.tf.tracing import require_own_trace


class HostTables:
    """The tables of a configuration with all their rows. Mutable: `variables` can be assigned and trained.

    Attributes:
      variables: by declaration, float32 `[vocabulary_size, dim]`.
    """

    def __init__(self, declared: DeclaredTables, *, restore_from: str | None, seed: int = 0) -> None:
        require_own_trace(None, "the making of the tables", "Call build() before.")
        for table in declared.tables:
            if table.dynamic_keys is not None:
                raise ValueError(
                    f"Found table '{table.name}' with capacity={table.dynamic_keys.capacity} outside the scope of a "
                    "strategy. Expected vocabulary_size, since variables have rows for ids from 0 on. Make the "
                    "embedding in the scope of a LocalStrategy or PodStrategy, and look up with training=False."
                )
        self._tables = [Table(spec, np.arange(spec.layout.num_buckets)) for spec in declared.specs(seed=seed)]
        self._num_steps = 0
        if restore_from is None:
            for table in self._tables:
                table.initialize()
        else:
            self._num_steps = storage().restore(restore_from, self._tables)
        self.variables: dict[TableConfig, Variable] = {
            config: Variable(whole_table(table)["rows"], trainable=True, name=config.name)
            for config, table in zip(declared.tables, self._tables, strict=True)
        }

    def read(self) -> list[dict[str, np.ndarray]]:
        """Per table copies of "rows" and of each slot."""
        self._take_variables()
        return [whole_table(table) for table in self._tables]

    def save(self, path: str) -> None:
        """Writes the variables, and the slots as they were restored or first made."""
        require_own_trace(None, "a call of save", "Save before or afterwards.")
        self._take_variables()
        storage().save(path, self._tables, num_steps=self._num_steps)

    def write(self, path: str) -> WrittenTables:
        """The files of `save`, without the index that makes them a saved embedding."""
        require_own_trace(None, "a call of save", "Save before or afterwards.")
        self._take_variables()
        return storage().write(path, self._tables, num_steps=self._num_steps)

    def restore(self, path: str) -> None:
        """Assigns what was saved to the variables."""
        require_own_trace(None, "a call of restore", "Restore before.")
        self._num_steps = storage().restore(path, self._tables)
        for variable, table in zip(self.variables.values(), self._tables, strict=True):
            variable.assign(whole_table(table)["rows"])

    def _take_variables(self) -> None:
        for variable, table in zip(self.variables.values(), self._tables, strict=True):
            ids = np.arange(table.spec.num_rows)
            table.store.write(table.index.rows_of(ids), {"rows": np.asarray(variable.value)})
