"""`EmbeddingState`: the state of a `TPUEmbedding` as programs read, save and restore it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.table_storage import WrittenTables, storage
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.tpu_embedding.building import BuiltEmbedding
from podembed.embedding.tf.tracing import require_eager

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingMetrics:
    """What an embedding has done since it was built or restored.

    Attributes:
      num_steps: calls of `apply_gradients`.
      learning_rates: by table, the rate of the last step; empty before the first.
      altered_ids: by table, ids outside the vocabulary that were dropped, clipped or hashed, as the table declares.
    """

    num_steps: int
    learning_rates: dict[str, float]
    altered_ids: dict[str, int]


def of_keys(spec: TableSpec, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What all rows of a table have, by its keys, rising, of which none waits.

    Args:
      arrays: float32 `[num_rows, width]` as of `TableSpec.widths`.
    """
    stored = dict(zip(arrays, spec.stored(arrays), strict=True))
    held = np.flatnonzero(stored["last"][:, 0])
    rows = held[np.argsort(stored["key"][held, 0])]
    found = {name: values[rows] for name, values in stored.items() if not name.startswith("waiting_")}
    return found | {name: found[name][:, 0] for name in found if name in spec.keys.columns}


_AROUND_IT = "Call it before the function or after it."


class EmbeddingState(BuiltEmbedding):
    """The tables of an embedding, and what it has done with them. Mutable."""

    @property
    def embedding_tables(self) -> dict[TableConfig, Variable]:
        """The tables without slots, `[vocabulary_size, dim]`, by their `TableConfig`. Only outside a scope, where they
        are built on demand.

        Raises:
          RuntimeError: made in the scope of a strategy, whose tables are sharded.
        """
        if self._strategy is not None:
            raise RuntimeError(
                "Unable to retrieve embedding tables when using a TPU strategy. Expected an object made outside any "
                "scope. Call save here and restore there, or read_tables for a copy."
            )
        if not self._is_built:
            self.build()
        return self._tables_here.variables

    def read_tables(self) -> dict[TableConfig, dict[str, np.ndarray]]:
        """A copy of all tables: "rows" and each slot, `[vocabulary_size, width]`. Of a table with a capacity those of
        the keys that have a row, with "key" (int64 `[n]`, rising), "last" (int32 `[n]`, the step that named it last,
        plus one) and "count" (uint32 `[n]`, how often it was named). Gradients that wait are applied first.

        Raises:
          RuntimeError: not built.
        """
        self._require_built("read_tables")
        require_eager("read_tables", _AROUND_IT)
        held = self._running.read_tables() if self._strategy is not None else self._tables_here.read()
        found = zip(self._declared.tables, self.declared_specs, held, strict=True)
        return {table: of_keys(spec, arrays) if spec.keys.columns else arrays for table, spec, arrays in found}

    def save(self, path: str) -> None:
        """Writes all rows and slots to a new folder or URL. Gradients that wait are applied first.

        Raises:
          RuntimeError: not built.
          StorageError: the storage failed, or `path` holds a saved embedding already.
        """
        self._require_built("save")
        require_eager("save", _AROUND_IT)
        if self._strategy is not None:
            self._running.save(path)
        else:
            self._tables_here.save(path)

    def write_tables(self, path: str) -> WrittenTables:
        """The files of `save`, for an index that names more than tables: see `Checkpoint`. Gradients that wait are
        applied first.

        Raises:
          RuntimeError: not built.
          StorageError: the storage failed.
        """
        require_eager("write_tables", _AROUND_IT)
        self._require_built("write_tables")
        return self._running.write(path) if self._strategy is not None else self._tables_here.write(path)

    def restore(self, path: str) -> None:
        """Fills rows and slots from what `save` wrote, by any number of hosts. Before `build`, at once when it is
        built.

        Raises:
          OrderError: a batch is in flight, whose gradients would be those of the rows of before; a batch with a name
            that was dequeued counts as one of inference.
          StorageError: nothing is saved there, or it is damaged.
          ValueError: the saved tables have other names, shapes or slots.
        """
        require_eager("restore", _AROUND_IT)
        if not self._is_built:
            storage().describe(path)
            self._restore_from = path
        elif self._strategy is not None:
            self._running.restore(path)
        else:
            self._tables_here.restore(path)

    @property
    def declared_specs(self) -> tuple[TableSpec, ...]:
        """The tables that the features use, in the order of first use, as engines hold them."""
        return self._declared.specs(seed=0 if self._strategy is None else self._strategy.seed)

    def drain(self) -> None:
        """Applies gradients that wait for the next forward, so that the tables hold every update."""
        self._require_strategy("drain")
        self._require_built("drain")
        require_eager("drain", _AROUND_IT)
        self._running.drain()

    def discard(self) -> None:
        """Forgets enqueued batches, as after an error in the middle of a step; the next call is an `enqueue`. No update
        is lost or made.
        """
        self._require_strategy("discard")
        self._require_built("discard")
        require_eager("discard", _AROUND_IT)
        self._running.discard()

    @property
    def metrics(self) -> EmbeddingMetrics:
        """Steps, applied learning rates and altered ids.

        Raises:
          RuntimeError: made outside a scope, or not built.
        """
        self._require_strategy("metrics")
        self._require_built("metrics")
        found = self._running.metrics()
        names = [str(table.name) for table in self._declared.tables]
        return EmbeddingMetrics(
            num_steps=found.num_steps,
            learning_rates=dict(zip(names, found.learning_rates, strict=False)),
            altered_ids=dict(zip(names, found.altered_ids, strict=True)),
        )

    def close(self) -> None:
        """Frees the tables, so that the strategy can hold another embedding. Safe to call twice. Inside `strategy.run`
        it does nothing and warns: other replicas may still need the tables.
        """
        require_eager("close", _AROUND_IT)
        if self._is_in_replica:
            _logger.warning(
                "close does nothing inside a function that a strategy runs. Expected a call on the driver, which frees "
                "the tables of all hosts. Move it there."
            )
            return
        if self._strategy is not None and self._engine is not None:
            if self._strategy.running is self._engine:
                self._strategy.stop_engine()
            self._engine = None

    def _held_variables(self) -> tuple[Variable, ...]:
        return tuple(self.embedding_tables.values()) if self._strategy is None else ()
