"""`Grid`: the hosts of a mesh in rows and columns, and who relays what to whom.

A frame from host s to host d goes to a relay first: the host in the row of s and the column of d. The relay joins all
that it has for d into one frame. So a host sends about 2 √n frames an exchange instead of n - 1.

Rows differ by at most one host, so the last column may end above the last rows. Hosts of these rows send what is for
that column to a relay in another row. This module is numbers alone; `two_hop` moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column as one sender sees it.

    Attributes:
      relay: host of this column that takes the sender's frames for all of it; may be the sender.
      ranks: hosts of the column, ascending.
    """

    relay: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlace:
    """One host in the grid.

    Attributes:
      columns: all of them.
      own: the number of its own column.
      sources: hosts whose frames each relay of the own column relays, itself included, by rank, ascending.
    """

    columns: tuple[Column, ...]
    own: int
    sources: dict[int, tuple[int, ...]]


class Grid:
    """The grid of a mesh.

    Attributes:
      num_ranks: hosts of the mesh.
      num_rows, num_columns: about the square root of it.
      most_frames: largest number of frames that a host sends or gets in an exchange.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        # Beyond twice the root the rows alone are more than that.
        candidates = range(1, min(num_ranks, 2 * isqrt(num_ranks) + 2) + 1)
        self.num_rows = min(candidates, key=lambda num_rows: _most_frames(num_ranks, num_rows))
        self.most_frames = _most_frames(num_ranks, self.num_rows)
        # The first rows have one host more.
        self._short, self._num_long = divmod(num_ranks, self.num_rows)
        self.num_columns = self._short + (self._num_long > 0)

    def row_of(self, rank: int) -> int:
        in_long_rows = self._num_long * (self._short + 1)
        if rank < in_long_rows:
            return rank // (self._short + 1)
        return self._num_long + (rank - in_long_rows) // self._short

    def column_of(self, rank: int) -> int:
        return rank - self._begin(self.row_of(rank))

    def relay(self, sender: int, column: int) -> int:
        """The host that takes what a host sends to those of a column."""
        row = self.row_of(sender)
        if column == self._short:
            # Only the long rows have this column; the others take turns at their relays.
            row %= self._num_long
        return self._begin(row) + column

    def column(self, number: int) -> tuple[int, ...]:
        """The hosts of a column, ascending."""
        num_rows = self._num_long if number == self._short else self.num_rows
        return tuple(self._begin(row) + number for row in range(num_rows))

    def senders(self, relay: int) -> tuple[int, ...]:
        """The hosts whose frames a host relays to its column, itself included, ascending."""
        row = self.row_of(relay)
        is_last_column = self.column_of(relay) == self._short
        rows = range(row, self.num_rows, self._num_long) if is_last_column else (row,)
        return tuple(rank for one in rows for rank in range(self._begin(one), self._begin(one + 1)))

    def place(self, rank: int) -> GridPlace:
        """The part of the grid that concerns a host."""
        own = self.column_of(rank)
        columns = tuple(
            Column(relay=self.relay(rank, number), ranks=self.column(number)) for number in range(self.num_columns)
        )
        return GridPlace(columns=columns, own=own, sources={relay: self.senders(relay) for relay in self.column(own)})

    def _begin(self, row: int) -> int:
        """The first rank of a row."""
        return row * self._short + min(row, self._num_long)


def _most_frames(num_ranks: int, num_rows: int) -> int:
    """`Grid.most_frames` of a grid of so many rows."""
    short, num_long = divmod(num_ranks, num_rows)
    num_columns = short + (num_long > 0)
    most = num_columns - 1 + num_rows - 1
    if not num_long:
        return most
    # A relay of the last column serves several rows where few rows have that column.
    served = num_columns + (-(-num_rows // num_long) - 1) * short
    return max(most, served - 1 + num_long - 1)
