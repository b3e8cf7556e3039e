"""`KeptRows`: the undo logs and snapshots of many tables hear together of rows that are about to change.

A step changes rows of many tables, and each may have an undo log and a snapshot. Told one by one, they took longer than
the update itself where tables are small. Here one kernel finds what has to be kept of all tables, and one for each
width copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from podembed.embedding.kernels.arrays import can_stream, matrix_of
from podembed.embedding.kernels.kept_rows import (
    BEGIN,
    COPY_COLUMNS,
    LOG_COLUMNS,
    NUM_COPIED,
    NUM_FREE,
    NUM_LOGGED,
    NUM_ROOMED,
    SNAPSHOT_COLUMNS,
    claim_rows,
    copy_rows,
)

__all__ = ["Keeper", "KeptRows", "Log", "Room", "Snapshot", "line_of"]

Matrices = Sequence[tuple[np.ndarray, np.ndarray]]
"""Arrays of a table, and the buffer for each."""
_NO_LOG, _NO_SNAPSHOT = (0,) * LOG_COLUMNS, (0,) * (SNAPSHOT_COLUMNS - 2)


class Log(Protocol):
    """What is asked of an undo log."""

    def line(self) -> tuple[int, ...]:
        """Its columns, as `kernels.kept_rows` has them."""
        ...

    def matrices(self) -> Matrices: ...

    def took(self, num_logged: int, num_lost: int) -> None:
        """So many rows were written to it, or lost."""
        ...


class Room(Protocol):
    """What is asked of the room of some snapshots."""

    def line(self) -> tuple[int, ...]:
        """Its columns, as `kernels.kept_rows` has them."""
        ...


class Snapshot(Protocol):
    """What is asked of a snapshot."""

    @property
    def room(self) -> Room: ...

    def line(self) -> tuple[int, ...]:
        """Address of its marks and of its heads, and how many rows are released."""
        ...

    def links_to(self, log: Log | None) -> bool:
        """Whether it finds in the log what that keeps from now on."""
        ...

    def matrices(self) -> Matrices: ...

    def took(self, num_rows: int) -> None:
        """So many rows were copied to its room."""
        ...


@dataclass(frozen=True, slots=True)
class Keeper:
    """`Table.before_change` of a table whose rows are kept together with those of others.

    Attributes:
      keep: the same for all that are kept together. It takes numbers of tables, and for each the address of its rows
        (int64) and how many they are, int64 `[t, 2]`.
      number: of the table.
    """

    keep: Callable[[Sequence[int], np.ndarray], None]
    number: int

    def __call__(self, rows: np.ndarray) -> None:
        rows = np.ascontiguousarray(rows, np.int64)
        self.keep((self.number,), line_of(rows))


def line_of(rows: np.ndarray) -> np.ndarray:
    """Rows of one table (int64), as a kernel takes them; the caller keeps them alive."""
    return np.array([[rows.ctypes.data, len(rows)]], np.int64)


class KeptRows:
    """The undo log and the snapshot of each table; either may be None. For one thread at a time.

    Mutated: what of the tables is kept where; the tables themselves are not.
    """

    def __init__(self, kept: Sequence[tuple[Log | None, Snapshot | None]]) -> None:
        self._kept = tuple(kept)
        rooms = list(dict.fromkeys(snapshot.room for _, snapshot in kept if snapshot is not None))
        self._rooms = rooms
        numbers = {id(room): number for number, room in enumerate(rooms)}
        self._room_of = [0 if snapshot is None else numbers[id(snapshot.room)] for _, snapshot in kept]
        self._of_logs = _Copies([() if log is None else log.matrices() for log, _ in kept])
        self._of_rooms = _Copies([() if snapshot is None else snapshot.matrices() for _, snapshot in kept])
        self._rows = [np.empty(0, np.int64)] * 2
        self._entries = [np.empty(0, np.int32)] * 2

    def keep(
        self,
        numbers: Sequence[int],
        touched: np.ndarray,
        begin: tuple[int, int] = (0, 0),
        *,
        logs: bool = True,
        freezes: bool = True,
    ) -> tuple[int, int]:
        """To be called before rows change.

        Args:
          numbers: of the tables.
          touched: int64 `[t, 2]`, address of each table's rows (int64, any order, may repeat), and how many they are.
          begin: what an earlier call returned.
          logs, freezes: whether undo logs and snapshots hear of it.

        Returns:
          A position among `numbers` and the number of its row that found its room full. Rows before it may change.
          Call again with it when there is room. Past the last table if all may change.
        """
        tables = np.array([self._line(number, logs=logs, freezes=freezes) for number in numbers], np.int64)
        rooms = np.array([room.line() for room in self._rooms] or [(0,) * (NUM_FREE + 1)], np.int64)
        touched = np.ascontiguousarray(touched, np.int64)
        came = np.zeros((len(numbers), 3), np.int64)
        counts = touched[:, 1].copy()
        counts[: begin[0]] = 0
        self._make_scratch(int(counts.sum()))
        at, number = claim_rows(
            tables, rooms, touched, *begin, came, self._rows[0], self._entries[0], self._rows[1], self._entries[1]
        )
        begins = np.cumsum(counts) - counts
        self._of_logs.run(numbers, begins, came[:, NUM_LOGGED], self._rows[0], self._entries[0])
        self._of_rooms.run(numbers, begins, came[:, NUM_ROOMED], self._rows[1], self._entries[1])
        # Only what has been copied counts.
        self._take(numbers, came.tolist())
        return int(at), int(number)

    def _line(self, number: int, *, logs: bool, freezes: bool) -> tuple[int, ...]:
        log, snapshot = self._kept[number]
        if not logs:
            log = None
        of_log = _NO_LOG if log is None else log.line()
        if snapshot is None or not freezes:
            return (*of_log, *_NO_SNAPSHOT, 0, 0)
        return (*of_log, *snapshot.line(), self._room_of[number], snapshot.links_to(log))

    def _make_scratch(self, num_rows: int) -> None:
        if len(self._rows[0]) < num_rows:
            self._rows = [np.empty(num_rows, np.int64) for _ in range(2)]
            self._entries = [np.empty(num_rows, np.int32) for _ in range(2)]

    def _take(self, numbers: Sequence[int], came: Sequence[Sequence[int]]) -> None:
        for number, (num_logged, num_lost, num_roomed) in zip(numbers, came, strict=True):
            log, snapshot = self._kept[number]
            if log is not None and (num_logged or num_lost):
                log.took(num_logged, num_lost)
            if snapshot is not None and num_roomed:
                snapshot.took(num_roomed)


class _Copies:
    """All copies from tables to buffers, by their width.

    Args:
      matrices: of each table.
    """

    def __init__(self, matrices: Sequence[Matrices]) -> None:
        self._num_tables = len(matrices)
        of_width: dict[int, tuple[list[int], list[tuple[int, ...]]]] = {}
        for number, of_table in enumerate(matrices):
            for array, buffer in of_table:
                dim = array.shape[1]
                tables, lines = of_width.setdefault(dim, ([], []))
                tables.append(number)
                lines.append((*matrix_of(array), *matrix_of(buffer), can_stream(buffer, dim), 0, 0))
        self._of_width = {
            dim: (np.array(tables), np.array(lines, np.int64).reshape(-1, COPY_COLUMNS))
            for dim, (tables, lines) in of_width.items()
        }

    def run(
        self, numbers: Sequence[int], begins: np.ndarray, counts: np.ndarray, rows: np.ndarray, entries: np.ndarray
    ) -> None:
        """Copies the listed rows of some tables.

        Args:
          begins, counts: int64 `[t]`, which of the listed rows are those of each of `numbers`.
        """
        if not counts.any():
            return
        places = np.zeros((2, self._num_tables), np.int64)
        places[:, list(numbers)] = begins, counts
        for dim, (tables, lines) in self._of_width.items():
            some = places[1, tables] > 0
            copies = lines[some]
            copies[:, BEGIN], copies[:, NUM_COPIED] = places[:, tables[some]]
            copy_rows(dim, copies, rows, entries)
