"""The seam between tables and the memory behind them: `RowStore` for one table, `StoreGroup` for many at once.

A `StoreKind` makes both, and what saves and undo ask of them: `UndoLog`, `RowSnapshot` and `PreImages`. Rows are known
by their local numbers. Which id a row belongs to is the business of the table's index, when a row changes that of
`Table`. A table's kind is a value of its `TableSpec`; `ram.RAM` is the usual one. Nobody but `table.py` names a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from podembed.embedding.kernels.threads import Threads
from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.row_optimizers.row_step import TouchedRows

if TYPE_CHECKING:
    from podembed.embedding.table.table import Table


class RowStore(Protocol):
    """Rows and slots of one table, which always change together; zero at first. Not safe for two threads to change at
    once, but for `update` with other rows.
    """

    @property
    def num_rows(self) -> int:
        """Rows, without spare ones, which lie behind them."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of rows and slots, without spare ones."""
        ...

    def view(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Views of the rows `start` to `stop - 1` and of their slots: "rows" and each slot, float32
        `[stop - start, width]`, contiguous. Writing to them changes the store.
        """
        ...

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of some rows (int64 `[n]`) and of their slots, `[n, width]` each."""
        ...

    def write(self, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Replaces some rows (int64 `[n]`), or some of their slots, by `[n, width]` values each."""
        ...

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """As `Table.gather`."""
        ...

    def gather_to(self, rows: np.ndarray, addresses: np.ndarray) -> None:
        """As `Table.gather_to`."""
        ...

    def pool(
        self,
        index: np.ndarray,
        row_splits: np.ndarray,
        weights: np.ndarray | None,
        combiner: str,
        out: np.ndarray,
        **some: Any,
    ) -> None:
        """Combines rows; arguments as `kernels.pool.pool`, `index` being local rows."""
        ...

    def update(
        self,
        optimizer: Optimizer,
        touched: TouchedRows,
        gradients: Sequence[np.ndarray] | np.ndarray,
        learning_rate: float,
    ) -> None:
        """Applies one step of an optimizer; arguments as `Optimizer.apply`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """Touched rows of a table and the addresses of their gradient rows, grouped by row; see
    `embedding.kernels.grouped`. Where ids have weights, the addresses have a second column, see `kernels.updates`.
    """

    rows: np.ndarray
    starts: np.ndarray
    addresses: np.ndarray

    @staticmethod
    def joined(parts: Sequence[GroupedRows]) -> GroupedRows:
        """Of the parts of a table, one after another."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(len(part.addresses) for part in parts)])
        return GroupedRows(
            np.concatenate([part.rows for part in parts]),
            np.concatenate(
                [*(part.starts[:-1] + np.int32(at) for part, at in zip(parts, before, strict=False)), before[-1:]]
            ).astype(np.int32),
            np.concatenate([part.addresses for part in parts]),
        )

    @property
    def touched(self) -> TouchedRows:
        return TouchedRows(rows=self.rows, head=self.starts, following=None)


NO_ROWS = GroupedRows(np.zeros(0, np.int64), np.zeros(1, np.int32), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledFeature:
    """A feature that this host pools.

    Attributes:
      table: position in the list of tables.
      pooling: the combiner of `pool`: a sum, where this host has a part of each bag.
      combiner: of the whole bag.
    """

    table: int
    pooling: str
    combiner: str


@dataclass(slots=True, eq=False)
class ScaledGradients:
    """Gradients of bags as they enter the sums of a step, where those are divided first.

    Attributes:
      where: (host, feature) of each, by number.
      lines: int64 `[n, 2]`: the address of each, and the bytes from bag to bag.
      memory: float32 in which all of them lie.
    """

    where: np.ndarray
    lines: np.ndarray
    memory: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))


class StoreGroup(Protocol):
    """The tables of the features that a host pools, for work on all of them at once. Tables change through `update`
    only.

    Attributes:
      dims: int64 `[num_features]`, widths.
    """

    dims: np.ndarray

    def pool(self, asked: Sequence[np.ndarray], out: Sequence[np.ndarray], thread_pool: Threads) -> None:
        """Combines the rows of all bags of several hosts.

        Args:
          asked: per host int64 `[num_features, BAGS]`, see `kernels.bag_frames`.
          out: per host, where the vectors go, as `kernels.arrays.BlockLines` gives it.

        Raises:
          ValueError: a block has not one vector a bag, or another width than the table. Nothing is written then.
        """
        ...

    def group(
        self, asked: Sequence[np.ndarray], gradients: Sequence[np.ndarray], thread_pool: Threads
    ) -> tuple[Mapping[int, GroupedRows], ScaledGradients]:
        """Sorts what all hosts ask by row.

        Args:
          asked: as of `pool`, of all hosts.
          gradients: per host, where those of its vectors will lie, as `BlockLines` gives it.

        Returns:
          By table its touched rows. Gradients that `scale` must make before they are used.

        Raises:
          ValueError: a row is not held here, or a block is not one of its bags, as of `pool`.
        """
        ...

    def scale(
        self,
        scaled: ScaledGradients,
        asked: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray],
        thread_pool: Threads,
    ) -> None:
        """Divides the gradients of bags by their denominators, into `scaled`.

        Args:
          asked, gradients: as of `group`, once the gradients are there.

        Raises:
          ValueError: a block is not one of its bags, as of `pool`.
        """
        ...

    def update(self, grouped: Mapping[int, GroupedRows], learning_rates: Sequence[float], thread_pool: Threads) -> None:
        """Updates each touched row once. The gradients lie where `group` got them from.

        Args:
          grouped: what `group` returned.
          learning_rates: one a table of the job.

        Raises:
          ValueError: as `Table.begin_update`. Nothing has changed then.
        """
        ...


class UndoLog(Protocol):
    """Undo of one store to one or two earlier moments. Which of them is gone back to is known only later.

    Attributes:
      size_bytes: memory of a full log.
      buffers: the largest part of that memory, which is taken page by page unless `populate` does it before.
    """

    @property
    def size_bytes(self) -> int: ...

    @property
    def buffers(self) -> Sequence[np.ndarray]: ...

    def begin(self) -> None:
        """Forgets everything: the present values are the older moment, and there is no newer one."""
        ...

    def freeze(self) -> None:
        """Makes the present values the newer moment. One that was there before is none any more: what changed since it
        counts as since the older.
        """
        ...

    def advance(self) -> None:
        """Lets go of the older moment; the newer one takes its place."""
        ...

    def undo(self, *, to_newer: bool = False) -> np.ndarray:
        """Gives all rows the values that they had at a moment, but for those that are lost. Only `begin` may follow.

        Returns:
          Lost rows, int64, rising: their values are those of some later time.
        """
        ...


class RowSnapshot(Protocol):
    """The values of one store at one moment, while the store goes on changing.

    Attributes:
      is_released: whether no frozen value is needed any more.
      taken: share of its buffer that it has taken; 0 where that cannot become full.
      all_taken: the same of all snapshots that share the buffer.
    """

    @property
    def is_released(self) -> bool: ...

    @property
    def taken(self) -> float: ...

    @property
    def all_taken(self) -> float: ...

    def freeze(self, *, joins_before: bool = False, reads_log: bool = False) -> None:
        """Takes the present values for the frozen ones, and forgets those of an earlier moment, but for which rows
        changed since.

        Args:
          joins_before: `changed` will tell of what changed since the last freeze but one, and so on while this is set:
            since the last freeze without it.
          reads_log: whether the newer moment of the store's undo log is this one, and stays so until all rows are
            released.
        """
        ...

    def read(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """Copies the frozen values of rows `start` to `stop - 1`, which must not have been released.

        Args:
          out: one float32 `[stop - start, width]` for rows and each slot, C-contiguous.
        """
        ...

    def changed(self, start: int, stop: int) -> np.ndarray:
        """Which of the rows `start` to `stop - 1` changed between the last two freezes: int64, from 0 at `start`."""
        ...

    def release(self, stop: int) -> None:
        """Says that the frozen values of rows below `stop` are not needed any more."""
        ...


class PreImages(Protocol):
    """What is kept of many stores before their rows change, for undo and for a save. For one thread at a time.

    Attributes:
      snapshots: one a store.
      size_bytes: memory of the snapshots.
      buffers: a part of that memory, which is taken as rows come in.
      taken: share of the fullest buffer of snapshots.
    """

    @property
    def snapshots(self) -> Sequence[RowSnapshot]: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def buffers(self) -> Sequence[np.ndarray]: ...

    @property
    def taken(self) -> float: ...

    def touched(self, rows: np.ndarray) -> Any:
        """Rows of one store (int64, contiguous, any order, may repeat), as `keep` takes them. The caller keeps them
        alive. A `StoreGroup` of the same kind may give those of many stores in one value.
        """
        ...

    def keep(
        self,
        numbers: Sequence[int],
        touched: Any,
        begin: tuple[int, int] = (0, 0),
        *,
        logs: bool = True,
        freezes: bool = True,
    ) -> tuple[int, int]:
        """To be called before rows change.

        Args:
          numbers: of the stores.
          touched: their rows.
          begin: what an earlier call returned.
          logs, freezes: whether undo logs and snapshots hear of it.

        Returns:
          A position among `numbers` and the number of its row that found its buffer full. Rows before it may change.
          Call again with it when there is room. Past the last store if all may change.
        """
        ...

    def settle(self) -> None:
        """To be called when no snapshot is read any more."""
        ...


@dataclass(frozen=True, slots=True)
class Keeper:
    """`Table.before_change` of a table whose rows are kept together with those of others.

    Attributes:
      keep: the same for all that are kept together. It takes numbers of tables and their rows, as `PreImages.keep`.
      number: of the table.
      touched: as of `PreImages`.
    """

    keep: Callable[[Sequence[int], Any], None]
    number: int
    touched: Callable[[np.ndarray], Any]

    def __call__(self, rows: np.ndarray) -> None:
        rows = np.ascontiguousarray(rows, np.int64)
        self.keep((self.number,), self.touched(rows))


class StoreKind(Protocol):
    """Where the rows of tables lie. Compared by value, and the same in all processes of a run."""

    def new(self, widths: Mapping[str, int], num_rows: int, num_spare: int = 0) -> RowStore:
        """A store of zeros.

        Args:
          widths: columns of "rows" and of each slot, in the order of checkpoints.
          num_rows: of each array.
          num_spare: further rows, which logs and pre-images leave out.
        """
        ...

    def group(self, tables: Sequence[Table], features: Sequence[PooledFeature], *, num_hosts: int) -> StoreGroup:
        """For work on the tables of several features.

        Args:
          tables: all tables of the job.
          features: those pooled here, in the order of the frames that ask for them.
          num_hosts: hosts that ask.
        """
        ...

    def undo_logs(self, stores: Sequence[Any], *, budget_bytes: int) -> Sequence[UndoLog]:
        """One log a store, all together of at most so many bytes, but with room for a row each."""
        ...

    def pre_images(self, stores: Sequence[Any], logs: Sequence[Any], *, buffer_bytes: int) -> PreImages:
        """
        Args:
          logs: of each store its undo log, or None.
          buffer_bytes: for rows that change before a snapshot of them is read.
        """
        ...
