"""`WantedRows`: what all hosts want of the tables of one group, in the order in which a table is read and updated.

Rows travel host by host. A table is read stream by stream. So what arrives is listed anew, once, by a kernel. After
that one call a table serves all hosts, however many there are.

Where a row goes, and where its gradient comes, is an address. It lies in `served` for another host and in `rows` for
this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.kernels.arrays import matrix_of
from podembed.embedding.kernels.requests import rows_by_stream
from podembed.embedding.lookup.prefetch import MIN_PREFETCH_SHARE, Part, Split


@dataclass(slots=True, eq=False)
class WantedRows:
    """The rows of one group.

    Attributes:
      rows: int64 `[n]`, local rows, stream by stream and host by host within a stream; keys until those are resolved.
      places: int64 `[n]`, the position of each in `served`, which has them host by host, stream by stream.
      stream_starts: int64 `[num_streams + 1]`, where each stream begins in `rows`.
      host_starts: int64 `[num_hosts + 1]`, where each host begins in `served`.
      targets: int64 `[n]`, by place, the position at which a row is sent; None while that is its place. Filled by
        `split`.
      is_early: bool `[n]`, by place, whether a row goes before the update of the step under way. As `targets`.
    """

    rows: np.ndarray
    places: np.ndarray
    stream_starts: np.ndarray
    host_starts: np.ndarray
    targets: np.ndarray | None = None
    is_early: np.ndarray | None = None

    def of_streams(self, first: int, stop: int) -> slice:
        """The entries of the streams `first` to `stop - 1` of the group."""
        return slice(int(self.stream_starts[first]), int(self.stream_starts[stop]))

    def addresses(self, served: np.ndarray, rows: np.ndarray, own: int, own_start: int) -> np.ndarray:
        """int64 `[n]`, where each row lies, in the order of `rows`.

        Args:
          served: float32 `[n, dim]`, of the group.
          rows: float32 `[rows that this host asked, dim]`, of the group.
          own: this host.
          own_start: where its own piece begins in `rows`.
        """
        return self._addresses(self.places, served, rows, own, own_start)

    def targets_of(
        self, part: Part, served: np.ndarray, rows: np.ndarray, own: int, own_start: int
    ) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Where each row of a part is sent: addresses, and which entries they are. Entries None are all; None is
        nothing at all. Arguments as for `addresses`.
        """
        if self.targets is None or self.is_early is None:
            return None if part is Part.PREFETCHED else (self.addresses(served, rows, own, own_start), None)
        entries = np.flatnonzero(self.is_early[self.places] == (part is Part.PREFETCHED))
        return self._addresses(self.targets[self.places[entries]], served, rows, own, own_start), entries

    def _addresses(
        self, positions: np.ndarray, served: np.ndarray, rows: np.ndarray, own: int, own_start: int
    ) -> np.ndarray:
        start, stride_bytes = matrix_of(served)
        found = start + stride_bytes * positions
        first, stop = int(self.host_starts[own]), int(self.host_starts[own + 1])
        if stop > first:
            is_own = (positions >= first) & (positions < stop)
            own_address, own_stride_bytes = matrix_of(rows)
            found[is_own] = own_address + own_stride_bytes * (positions[is_own] - first + own_start)
        return found


def listed(wanted: Sequence[np.ndarray], counts: np.ndarray, groups: Sequence[Sequence[int]]) -> list[WantedRows]:
    """By group, what all hosts want.

    Args:
      wanted: per host, int64 keys, group by group, stream by stream.
      counts: int64 `[num_hosts, num_streams]`, of all streams.
      groups: the streams of each.

    Raises:
      ValueError: the counts are not those of the rows.
    """
    rows = wanted[0] if len(wanted) == 1 else np.concatenate(wanted)
    order = [at for group in groups for at in group]
    expected = counts[:, order].sum(axis=1).tolist()
    if [len(one) for one in wanted] != expected:
        raise ValueError(
            f"Found {[len(one) for one in wanted]} rows that hosts want. Expected {expected}, as they announced. Check "
            "that all hosts are of one generation."
        )
    starts = starts_of(np.ascontiguousarray(counts[:, order]))
    found, first = [], 0
    for group in groups:
        of_group = np.ascontiguousarray(counts[:, list(group)])
        num_rows = int(of_group.sum())
        listing = WantedRows(
            rows=np.empty(num_rows, np.int64),
            places=np.empty(num_rows, np.int64),
            stream_starts=_starts(of_group.sum(axis=0)),
            host_starts=starts_by_host(of_group),
        )
        here = np.ascontiguousarray(starts[:, first : first + len(group)])
        rows_by_stream(rows, here, of_group, starts_of(of_group), listing.rows, listing.places)
        found.append(listing)
        first += len(group)
    return found


def split_rows(
    wanted: Sequence[WantedRows], late: Sequence[np.ndarray], widths: Sequence[int], *, own: int
) -> list[Split | None]:
    """Decides for each host whether some of its rows go early, and notes in `wanted` where each row is sent.

    For a host with a split, `served` gets the early rows of its piece first, then the others. The own piece is never
    packed.

    Args:
      late: per group bool `[n]`, by place, whether the step under way touches the row.
      widths: per group.
      own: this host.

    Returns:
      Per host its split, or None.
    """
    num_hosts = len(wanted[0].host_starts) - 1 if wanted else 0
    free, everything = np.zeros(num_hosts, np.int64), np.zeros(num_hosts, np.int64)
    early_before = []
    for one, flags, width in zip(wanted, late, widths, strict=True):
        before = _starts(~flags)
        early_before.append(before)
        free += width * np.diff(before[one.host_starts])
        everything += width * np.diff(one.host_starts)
    is_split = (free > 0) & (free >= MIN_PREFETCH_SHARE * everything)
    if not is_split.any():
        return [None] * num_hosts
    for one, flags, before in zip(wanted, late, early_before, strict=True):
        lengths = np.diff(one.host_starts)
        places = np.arange(len(flags))
        one.is_early = np.repeat(is_split, lengths) & ~flags
        start, num_early = one.host_starts[:-1], np.diff(before[one.host_starts])
        rank = before[:-1] - np.repeat(before[start], lengths)
        packed = np.where(flags, places - rank + np.repeat(num_early, lengths), np.repeat(start, lengths) + rank)
        is_packed = is_split.copy()
        is_packed[own] = False
        one.targets = np.where(np.repeat(is_packed, lengths), packed, places)
    splits: list[Split | None] = [None] * num_hosts
    for host in np.flatnonzero(is_split).tolist():
        splits[host] = Split.of(
            [flags[one.host_starts[host] : one.host_starts[host + 1]] for one, flags in zip(wanted, late, strict=True)]
        )
    return splits


def starts_of(counts: np.ndarray) -> np.ndarray:
    """Counts `[num_hosts, num_streams]` → where each piece begins when laid out host by host, stream by stream."""
    flat = counts.reshape(-1)
    return (np.cumsum(flat) - flat).reshape(counts.shape)


def starts_by_host(counts: np.ndarray) -> np.ndarray:
    """Counts `[num_hosts, num_streams]` → int64 `[num_hosts + 1]`, where each host's pieces begin, and the end."""
    return _starts(counts.sum(axis=1))


def _starts(counts: np.ndarray) -> np.ndarray:
    """int64 `[n + 1]`, the sums of the first 0, 1, ... n counts."""
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found
