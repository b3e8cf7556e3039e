"""Kernels that list rows anew: host by host, as they travel, or stream by stream, as tables are read and updated."""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.row_vectors import jit


def rows_by_stream(
    rows: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    places: np.ndarray,
    out: np.ndarray,
    out_places: np.ndarray,
) -> None:
    """Lists rows stream by stream, and host by host within a stream.

    Args:
      rows: int64 `[n]`, in any order of pieces, one for each host and stream.
      starts: int64 `[num_hosts, num_streams]`, where each piece begins in `rows`.
      counts: int64 `[num_hosts, num_streams]`, the rows of each piece.
      places: int64 `[num_hosts, num_streams]`, a number for the first row of each piece; the next rows count on.
      out: int64 `[n]`; receives the rows.
      out_places: int64 `[n]`; receives their numbers.

    Raises:
      ValueError: an array is too small for the pieces.
    """
    _check_pieces(rows, starts, counts, min(len(out), len(out_places)))
    _rows_by_stream(plain(rows, np.int64), starts, counts, places, out, out_places)


@jit
def _rows_by_stream(rows, starts, counts, places, out, out_places):
    filled = 0
    for stream in range(counts.shape[1]):
        for host in range(counts.shape[0]):
            first, place = starts[host, stream], places[host, stream]
            for j in range(counts[host, stream]):
                out[filled] = rows[first + j]
                out_places[filled] = place + j
                filled += 1


def rows_by_host(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
    """The other way: from stream by stream to pieces that begin at `starts` in `out`; arguments as above."""
    _check_pieces(out, starts, counts, len(rows))
    _rows_by_host(plain(rows, np.int64), starts, counts, out)


@jit
def _rows_by_host(rows, starts, counts, out):
    read = 0
    for stream in range(counts.shape[1]):
        for host in range(counts.shape[0]):
            first = starts[host, stream]
            for j in range(counts[host, stream]):
                out[first + j] = rows[read]
                read += 1


def _check_pieces(pieces: np.ndarray, starts: np.ndarray, counts: np.ndarray, room: int) -> None:
    ends = starts + counts
    fits = not counts.size or (counts.min() >= 0 and starts.min() >= 0 and ends.max() <= len(pieces))
    if not fits or int(counts.sum()) != room:
        raise ValueError(
            f"Found pieces of {int(counts.sum())} rows that end at {ends.max(initial=0)}, {len(pieces)} rows in pieces "
            f"and {room} in a list. Expected as many in each. Check that all hosts are of one generation."
        )
