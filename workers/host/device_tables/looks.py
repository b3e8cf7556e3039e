"""`DeviceLooks`: a table on devices, to be looked at; and `NamedRows`: which rows of a host a step names.

Devices have the rows, so a look asks for those of its sample, before the step and after it. A host's own batch does not
tell which of its rows a step updates. So before such a step hosts send the ids of their batches to the owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.host.device_tables.rows import DeviceRows
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh


class DeviceLooks:
    """See `table_looks.look.SeenTable`. Rows have their ids as numbers.

    Args:
      at: position among all tables of the job.
      table: as this host holds it.
      rows: gives those that devices have.
    """

    def __init__(self, at: int, table: Table, rows: DeviceRows) -> None:
        self._at, self._table, self._rows = at, table, rows

    @property
    def spec(self) -> TableSpec:
        return self._table.spec

    def numbers_of(self, ids: np.ndarray) -> np.ndarray:
        return np.where(self._table.index.rows_of(ids) < 0, -1, ids)

    def values(self, numbers: np.ndarray) -> Mapping[str, np.ndarray]:
        return self._rows.values(self._at, numbers)

    def watch(self, take: Callable[[np.ndarray], None] | None) -> None:
        """Nothing: hosts say by `NamedRows` what a step updates."""


class NamedRows:
    """The rows of one host that a step on all devices updates.

    Args:
      tables: by position those on devices, as this host holds them.
      mesh: connected to all other hosts.
      features: of each of these tables, those that look up in it.
      owners: of all tables, int32 `[num_buckets]`, the owner of each bucket.
      timeout_s: longest wait for the other hosts.
    """

    def __init__(
        self,
        tables: Mapping[int, Table],
        mesh: Mesh,
        *,
        features: Mapping[int, Sequence[str]],
        owners: Sequence[np.ndarray],
        timeout_s: float,
        tracker: Tracker,
    ) -> None:
        self._tables = {at: table for at, table in tables.items() if table.spec.optimizer is not None}
        self._mesh, self._features, self._owners = mesh, features, owners
        self._timeout_s, self._tracker = timeout_s, tracker

    def here(self, step: int, bags: Mapping[str, Ragged]) -> dict[str, np.ndarray]:
        """By name of a table, int64 rising: the rows of this host that any host's batch names. All rows where the rule
        changes all in each step.

        Args:
          bags: of this host's batch.

        Raises:
          MeshError: a host is gone or silent.
          ValueError: a host sent something else.
        """
        if not self._tables:
            return {}
        num_hosts = self._mesh.identity.num_ranks
        split = [self._split(at, bags, num_hosts) for at in self._tables]
        with self._tracker.phase(Phase.ID_EXCHANGE):
            parts = self._exchange(step, split) if num_hosts > 1 else [[one[0]] for one in split]
        found = {}
        for table, ids in zip(self._tables.values(), parts, strict=True):
            if table.spec.optimizer is not None and table.spec.optimizer.touches_all_rows:
                ids = [table.spec.layout.ids_of(int(bucket)) for bucket in table.buckets]
            found[table.spec.name] = np.unique(np.concatenate([np.zeros(0, np.int64), *ids]))
        return found

    def _split(self, at: int, bags: Mapping[str, Ragged], num_hosts: int) -> list[np.ndarray]:
        """The ids of a table in a batch, each once, by owner."""
        ids = np.unique(np.concatenate([bags[name].values for name in self._features[at]]))
        owner = self._owners[at][self._tables[at].spec.layout.buckets_of(ids)]
        order = np.argsort(owner, kind="stable")
        return np.split(ids[order], np.cumsum(np.bincount(owner, minlength=num_hosts))[:-1])

    def _exchange(self, step: int, split: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """By table, what each host named of this one's rows. A frame has the number of rows of each table in front."""
        own, num_tables = self._mesh.identity.rank, len(split)
        frames: dict[int, np.ndarray] = {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            if num_bytes % 8 or num_bytes < 8 * num_tables:
                raise ValueError(
                    f"Host {host} sent {num_bytes} bytes of named rows. Expected whole int64, and {num_tables} or more."
                )
            frames[host] = np.empty(num_bytes // 8, np.int64)
            return frames[host]

        send = [[np.array([len(one) for one in of_host], np.int64), *of_host] for of_host in zip(*split, strict=True)]
        self._mesh.exchange(tag=Tag.NAMED_ROWS, step=step, send=send, receive=receive, timeout_s=self._timeout_s)
        parts = [[one[own]] for one in split]
        for host, frame in frames.items():
            counts, ids = frame[:num_tables], frame[num_tables:]
            ends = np.cumsum(counts)
            if (counts < 0).any() or ends[-1] != len(ids):
                raise ValueError(
                    f"Host {host} announced {counts.tolist()} named rows and sent {len(ids)}. Expected as many."
                )
            for of_table, sent in zip(parts, np.split(ids, ends[:-1]), strict=True):
                of_table.append(sent)
        return parts
