"""`HostGeneration`: all that one host has for one generation. It is made, used, and thrown away; only rows outlive it.

Made, it listens for peers and for its device process. Connected, it can restore its shard, train and evaluate. What the
parts do is theirs: `shard` has the rows, `windows` the steps, `mesh` the other hosts, and `HostInput` the batches.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from podembed.workers.device.shared_memory import ChannelEnd, ChannelLayout, ChannelServer
from podembed.workers.faults.frames import frame_spoiler
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.faults.storage import faulty_store
from podembed.workers.host.input import HostInput
from podembed.workers.host.lookups import HostLookups
from podembed.workers.host.row_norms import RowNorms
from podembed.workers.host.same_machine import share_pooled
from podembed.workers.host.shard import Shard, Survivor
from podembed.workers.host.spec import HostReady, HostSpec
from podembed.workers.host.step import Steps
from podembed.workers.host.tables_on_devices import DeviceIds, DeviceRows, ids_layout
from podembed.workers.host.windows import Windows
from podembed.workers.job.tables import device_tables
from podembed.workers.liveness.progress import Tracker
from podembed.workers.liveness.worker import Worker
from podembed.workers.mesh.handshake import MeshIdentity
from podembed.workers.mesh.mesh import Mesh

# A survivor of a fault that is still reading input after so long is not waited for.
LEAVE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 30.0


class HostGeneration:
    """One host in one generation.

    Attributes:
      shard: its rows; they are of this generation until `leave`.
      store: store of the run.
      mesh: its connections to the other hosts.
      on_same_machine: hosts that share memory with this one.
      take_rows: brings the rows of tables on devices to this host, as `DeviceRows.take`; nothing until `connect`.
    """

    def __init__(
        self,
        spec: HostSpec,
        *,
        tracker: Tracker,
        check: Callable[[], None],
        survivor: Survivor | None = None,
    ) -> None:
        """Allocates or takes over the shard, and listens.

        Args:
          check: called in every wait; raises to end it.
          survivor: survivor of the generation before, cut for this one; None allocates new tables.

        Raises:
          As `HostWorker.start`.
        """
        self.spec, self._tracker, self._check = spec, tracker, check
        self._job = job = spec.resolve_job()
        tracker.faults = faults = FaultPoints.of(spec.fault_plan, str(Worker("host", spec.host)))
        tracker.point("start.begin")
        self.store = faulty_store(spec.storage_url, faults)
        self._end: ChannelEnd | None = None
        self._windows: Windows | None = None
        self.on_same_machine: frozenset[int] = frozenset()
        self.take_rows: Callable[[], None] = _nothing
        with ExitStack() as opened:
            self._input = HostInput(spec, job, trace=tracker.trace)
            opened.callback(self._input.close, deadline_s=LEAVE_TIMEOUT_S)
            self._lookups = HostLookups.build(
                spec,
                job,
                num_samples=self._input.num_samples,
                tables=survivor and survivor.tables,
            )
            opened.callback(self._lookups.thread_pool.close)
            surviving = survivor and survivor.surviving
            self.shard = Shard(spec, self._lookups.both.tables, surviving=surviving, tracker=tracker, check=check)
            layout = ChannelLayout(
                num_dense=job.data.num_dense,
                activations=self._lookups.both.layout,
                num_buffers=self._lookups.num_buffers,
                sequences=tuple(job.sequences),
                columns=job.column_shapes,
                num_scores=job.num_scores,
                on_devices=ids_layout(job, self._lookups.both.specs, num_samples=self._input.num_samples),
            )
            self._server = ChannelServer(layout, generation=spec.generation)
            opened.callback(self._server.close)
            identity = MeshIdentity(
                run_id=spec.run_id,
                generation=spec.generation,
                token=spec.token,
                rank=spec.host,
                num_ranks=spec.num_hosts,
                plan_hash=spec.plan_hash,
            )
            self.mesh = Mesh.listen(
                identity, bind_address=spec.bind_address, spoil=frame_spoiler(faults), trace=tracker.trace
            )
            opened.callback(self.mesh.close)
            tracker.point("start.ready")
            # Everything is made, so from here on `close` closes it.
            opened.pop_all()

    @property
    def ready(self) -> HostReady:
        """What the driver must know before it can connect the hosts."""
        return HostReady(
            mesh_address=self.mesh.address,
            invitation=self._server.invitation,
            num_samples=self._input.num_samples,
            process=os.getpid(),
            hostname=socket.gethostname(),
            shard_bytes=self.shard.size_bytes,
            save_bytes=self.shard.save.size_bytes,
        )

    @property
    def windows(self) -> Windows:
        if self._windows is None:
            raise RuntimeError("The host has no device process. Expected connect first.")
        return self._windows

    def connect(self, addresses: Sequence[tuple[str, int]], *, timeout_s: float) -> tuple[str, ...]:
        """As `HostWorker.connect`."""
        self.mesh.connect(addresses, timeout_s=timeout_s)
        self._end = end = self._server.accept(timeout_s=timeout_s, keep_waiting=self._check)
        if self.spec.shares_memory:
            self.on_same_machine = share_pooled(
                self._lookups.both.pooled, self.mesh, self._server.descriptor, end.layout, timeout_s=timeout_s
            )
        self._server.close_descriptor()
        tables = self._lookups.both.tables
        rows = DeviceRows(
            {table.at: tables[table.at] for table in device_tables(self._job)},
            end,
            timeout_s=self.spec.step_timeout_s,
            check=self._check,
            tracker=self._tracker,
        )
        self.take_rows = rows.take
        steps = Steps(
            self._lookups,
            mesh=self.mesh,
            device=end,
            wire_dtype=self._job.wire_dtype,
            timeout_s=self.spec.step_timeout_s,
            tracker=self._tracker,
            check=self._check,
            sequences=self._job.sequences,
            overlap=self._job.overlap,
            schedule=self._job.schedule,
            leaves_out_unlabelled=self._job.leaves_out_unlabelled,
            ids=DeviceIds(self._job, self._lookups.both.specs, end, num_hosts=self.spec.num_hosts),
        )
        self._windows = Windows(
            self._job,
            batches=self._input,
            steps=steps,
            mesh=self.mesh,
            tracker=self._tracker,
            host=self.spec.host,
            give_rows=rows.give,
            norms=RowNorms(tables, {at: partial(rows.values, at) for at in rows.tables}),
        )
        return tuple(f"host {self.spec.host} refused {refused}" for refused in self.mesh.describe_refusals())

    def leave(self) -> Survivor:
        """Frees all but the rows. Returns them.

        Raises:
          ReadAheadError: the storage holds up a read.
        """
        survivor = self.shard.release()
        self.close(input_deadline_s=LEAVE_TIMEOUT_S)
        return survivor

    def close(self, *, input_deadline_s: float = CLOSE_TIMEOUT_S) -> None:
        """Frees sockets, shared memory, files and threads. Safe to call twice."""
        with ExitStack() as closing:
            # What is named last is closed first; an error of one keeps none of the others open.
            closing.callback(self._lookups.thread_pool.close)
            closing.callback(self.shard.close)
            closing.callback(self.mesh.close)
            closing.callback(self._server.close)
            if self._windows is not None:
                closing.callback(self._windows.close, deadline_s=input_deadline_s)
            if self._end is not None:
                closing.callback(self._end.close)
            self._input.close(deadline_s=input_deadline_s)


def _nothing() -> None:
    """Does nothing: without a device process there are no rows to take."""
