"""Malformed rows: what is said about each, when one is too many, and how they get from the reading thread to the
driver.

A row is malformed if one of its declared columns holds what the declaration refuses. That is an id outside its table, a
label that is null, not finite or none of the default loss, text that is no number. With `max_bad_rows=0` the first one
is an error that names it. Otherwise it becomes padding in its place: which rows are left out follows from the data and
its declaration alone. The result is the same at every replay and for any number of hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.workers.data.input_errors import InputError
from podembed.workers.data.unknown_values import UnknownColumn

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """One malformed row.

    Attributes:
      file: its path.
      row: counted from 0 in the file, header and blank lines left out.
      column: the first column that is refused, or "row" if the row does not fall into columns.
      found: what stands there, shortened.
      reason: what should stand there.
    """

    file: str
    row: int
    column: str
    found: str
    reason: str

    @property
    def place(self) -> tuple[str, int]:
        return self.file, self.row

    def __str__(self) -> str:
        return f"{self.found} in {self.file}, row {self.row}, column {self.column!r}. {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of rows that are read together. `first_row` counts in the file; `group` is the row group or
    block.
    """

    path: str
    group: int
    first_row: int


class RowFaults:
    """The malformed rows of one row group. Mutated by `add`.

    Attributes:
      is_bad: bool `[num_rows]`.
    """

    def __init__(self, origin: Origin, num_rows: int, *, tolerated: bool) -> None:
        self.is_bad = np.zeros(num_rows, bool)
        self._origin = origin
        self._tolerated = tolerated
        self._rows: dict[int, BadRow] = {}

    def add(self, bad: np.ndarray, column: str, *, found: Callable[[int], str], reason: str) -> None:
        """Takes the rows of a mask. A row that is malformed already keeps its first reason.

        Raises:
          InputError: there is one, and malformed rows are not tolerated.
        """
        for row in np.flatnonzero(bad & ~self.is_bad).tolist():
            shown = found(row)
            shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}…"
            if not self._tolerated:
                raise InputError(
                    f"Found {shown} in {self._origin.path}, row group {self._origin.group}, row "
                    f"{self._origin.first_row + row}, column {column!r}. {reason}"
                )
            self._rows[row] = BadRow(
                file=self._origin.path, row=self._origin.first_row + row, column=column, found=shown, reason=reason
            )
        self.is_bad |= bad

    @property
    def origin(self) -> Origin:
        """Whose rows they are."""
        return self._origin

    def among(self, rows: np.ndarray) -> list[BadRow]:
        """The malformed ones of these rows, in the order of the file."""
        return [self._rows[row] for row in np.sort(rows[self.is_bad[rows]]).tolist()]


class BadRowLog:
    """Malformed rows that one host has met, each once. The reading thread adds, the working thread takes; one lock
    guards both.

    Args:
      tell: called in the reading thread with a column of which no value is in its vocabulary.
    """

    def __init__(self, max_bad_rows: int, *, tell: Callable[[UnknownColumn], None] | None = None) -> None:
        self._tell = tell
        self._max_bad_rows = max_bad_rows
        self._lock = threading.Lock()
        self._places: set[tuple[str, int]] = set()
        self._new: list[BadRow] = []

    def add(self, rows: Sequence[BadRow]) -> None:
        """Raises:
        InputError: this host alone has met more than are tolerated.
        """
        with self._lock:
            for row in rows:
                if row.place not in self._places:
                    self._places.add(row.place)
                    self._new.append(row)
            if len(self._places) > self._max_bad_rows:
                raise InputError(too_many(self._new, self._max_bad_rows))

    def tell(self, columns: Sequence[UnknownColumn]) -> None:
        """Hands on columns without a known value."""
        if self._tell is not None:
            for column in columns:
                self._tell(column)

    def take(self) -> tuple[BadRow, ...]:
        """The rows that were added since the last call."""
        with self._lock:
            taken = tuple(self._new)
            self._new.clear()
            return taken


def too_many(rows: Sequence[BadRow], max_bad_rows: int) -> str:
    """The message that ends a run."""
    return (
        f"Found more than {max_bad_rows} malformed rows: {'; '.join(str(row) for row in rows[:3])} Expected at most "
        "max_bad_rows of them. Repair the data, or raise max_bad_rows to leave such rows out."
    )
