"""`HostWorker`: what a driver may ask of one host. It owns a shard of every table with its slots, its lanes of the
input, and its files.

A plain class: an actor wraps it on a cluster, a thread runs it in one process. It never touches JAX. One thread works
(`start`, `rejoin`, `connect`, `restore`, `verify`, `train`, `evaluate`, `begin_save`, `close`). Another one may be in
`write_save` meanwhile (`workers.checkpoint.background_save`). `status`, `acknowledge` and `abort` may be called from a
third at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.shard import ShardReceipt
from podembed.workers.device.doorway import ChannelError
from podembed.workers.host.generation import HostGeneration
from podembed.workers.host.shard import Survivor
from podembed.workers.host.spec import HostReady, HostSpec, HostWindow, ScoredSamples
from podembed.workers.host.survivors.surviving_shard import Restored
from podembed.workers.host.warm_start import TableStart, begin_tables
from podembed.workers.liveness.memory import give_back_free
from podembed.workers.liveness.progress import Phase, Progress, Recorded, Tracker
from podembed.workers.liveness.worker import Worker
from podembed.workers.storage.store import Store


class HostWorker:
    """One host, in one generation after another. See the module for threads.

    Args:
      tracker: has the timers of its phases; None makes one.
    """

    def __init__(self, tracker: Tracker | None = None) -> None:
        self._tracker = tracker or Tracker()
        # Replaced whole, so that other threads see all of a generation or nothing.
        self._generation: HostGeneration | None = None
        self._abort_reason: str | None = None

    def start(self, spec: HostSpec) -> HostReady:
        """Allocates the shard and listens for peers and for the device process.

        Raises:
          MemoryError: the shard does not fit.
          InputError, JobError, OSError: the data, the job or the address cannot be used.
        """
        return self._begin(spec)

    def rejoin(self, spec: HostSpec) -> HostReady:
        """Leaves a generation that was aborted and begins another one, with what is here of the rows of `spec.base`.

        The tables go back to that commit as far as the undo log reaches; `restore` reads the rest.

        Raises:
          As `start`; ReadAheadError: the storage holds up a read of the old generation.
        """
        # The driver waits for the answer to `abort` before it calls this; a later one is meant for the new generation.
        self._abort_reason = None
        if self._generation is None:
            # It was lost sight of before it had begun.
            return self._begin(spec)
        self._tracker.take_phase_s()
        with self._tracker.phase(Phase.UNDO):
            survivor = self._leave(self._generation, spec.base or "").recut(spec)
        return self._begin(spec, survivor)

    def _leave(self, generation: HostGeneration, base: str) -> Survivor:
        """Goes back to a commit, and throws the generation away: the caller has the only way to the tables then."""
        generation.shard.go_back_to(base)
        survivor = generation.leave()
        self._generation = None
        return survivor

    def _begin(self, spec: HostSpec, survivor: Survivor | None = None) -> HostReady:
        self._generation = self._new_generation(spec, survivor)
        return self._generation.ready

    def _new_generation(self, spec: HostSpec, survivor: Survivor | None) -> HostGeneration:
        return HostGeneration(spec, tracker=self._tracker, check=self._raise_if_aborted, survivor=survivor)

    def settle(self) -> None:
        """Answers when the calls before it have ended, well or not; this is how a driver knows that a host is free
        again.
        """

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> tuple[str, ...]:
        """Joins the mesh and waits for the device process. Returns a line for each connection that was not let in.

        Raises:
          MeshError: a peer is missing or refused us.
          ChannelTimeout: the device process did not come.
        """
        self._raise_if_aborted()
        return self._present.connect(addresses, timeout_s=timeout_s)

    def restore(self, tables: Sequence[TableFiles] | None) -> Restored:
        """Restores the shard from a commit, or with first values. What this host or another one holds of the commit is
        not read. What this host kept is verified while training goes on, and an evaluation or a save waits for that; or
        here, with `HostSpec.compares_first`.

        Raises:
          StorageError, ChunkDamaged: a file is missing or is not what was committed.
          MeshError: a peer is gone or silent.
        """
        with self._tracker.phase(Phase.RESTORE):
            present = self._present
            restored = present.shard.restore(
                tables, mesh=present.mesh, store=present.store, on_same_machine=present.on_same_machine
            )
            give_back_free()
            present.shard.take_memory()
            return restored

    def warm_start(self, location: str, starts: Sequence[TableStart]) -> None:
        """Fills the shard with what a new run begins from.

        Args:
          location: folder of the run whose files are read.
          starts: one a table, in the job's order.

        Raises:
          StorageError, ChunkDamaged: a file is missing or is not what was committed.
        """
        with self._tracker.phase(Phase.RESTORE):
            shard = self._present.shard
            begin_tables(Store(location), shard.tables, starts, on_chunk=self._tracker.mark)
            give_back_free()
            shard.take_memory()

    def train(
        self,
        first_step: int,
        last_step: int,
        is_followed: bool = False,
        is_profiled: bool = False,
        is_sampled: bool = False,
    ) -> HostWindow:
        """Runs steps `first_step` to `last_step - 1`.

        Args:
          is_followed: whether training goes on from `last_step` without a commit in between. With staleness, that step
            is then looked up before the last update of this window, as within a window. Numbers therefore do not depend
            on where windows end.
          is_profiled: whether the answer says what the last step's batch asked of each table.
          is_sampled: whether it has histograms of some of the samples.

        Raises:
          MeshError, ChannelError: a peer or the device process is gone or silent.
          InputError: the data cannot be read, or holds a value that its declaration refuses.
          RowsDamaged: a row that this host kept from before a fault was not the commit's.
        """
        self._present.shard.raise_if_damaged()
        return self._present.windows.train(
            first_step, last_step, is_followed=is_followed, is_profiled=is_profiled, is_sampled=is_sampled
        )

    def verify(self) -> None:
        """Waits until the rows that this host kept are known to be those of the commit that training went on from.

        Raises:
          RowsDamaged: some are others.
        """
        self._present.shard.finish_verification()

    def evaluate(self, first_batch: int = 0, last_batch: int | None = None) -> ScoredSamples | None:
        """Scores batches `first_batch` to `last_batch - 1` of this host's lanes of the evaluation data. Changes no row.

        Args:
          first_batch: the one after those that were scored before; 0 begins anew.
          last_batch: may be behind the last one; None scores all that are left.

        Returns:
          The samples of all batches, each once, when the last one is scored; None before.

        Raises:
          As `train`.
        """
        self.verify()
        return self._present.windows.evaluate(first_batch, last_batch)

    def begin_save(self, attempt: str = "", before_failed: bool = False) -> None:
        """Makes the present moment the one that `write_save` writes, as the commit `attempt`. Takes no time, but
        for the rows of tables that live on devices, which come here, and for rows that are still to be compared.

        Args:
          before_failed: the save before did not become a commit.

        Raises:
          ChannelError: the device process is gone or silent.
          RowsDamaged: as `train`.
        """
        self._tracker.point("save.begin")
        self.verify()
        self._present.take_rows()
        self._present.shard.save.freeze(attempt, before_failed=before_failed)

    def write_save(self, attempt: str, is_delta: bool) -> ShardReceipt:
        """Writes this host's buckets, as they were at `begin_save`, below `data/<attempt>`. From a thread of its own,
        while another trains.

        Args:
          is_delta: only the rows that changed since the save before, or since `restore`; wants
            `HostSpec.tracks_changes`.

        Raises:
          StorageError: the storage failed or held such files already.
        """
        generation = self._present
        is_first = generation.spec.host == 0
        return generation.shard.save.write(generation.store, attempt, is_first=is_first, is_delta=is_delta)

    def status(self) -> Progress:
        """The phase of the working thread, and the hosts that it waits for. From any thread."""
        progress, generation = self._tracker.progress(), self._generation
        if generation is None:
            return progress
        mesh, waits_for = generation.mesh, progress.waits_for
        if progress.phase.waits_for_device:
            waits_for = (Worker("device", generation.spec.host),)
        elif progress.phase.waits_for_hosts:
            waits_for = tuple(Worker("host", rank) for rank in mesh.waiting_for)
        return replace(progress, waits_for=waits_for, unheard_s=mesh.unheard_s)

    def trace_clock_s(self) -> float:
        """The clock of a trace. From any thread."""
        return self._tracker.trace.now_s()

    def begin_trace(self) -> None:
        """Records from now on what this process does. From any thread."""
        self._tracker.trace.begin()

    def end_trace(self) -> Recorded:
        """The recorded spans. From any thread."""
        return self._tracker.trace.end()

    def acknowledge(self, commit: str) -> None:
        """The commit stands: what the undo log kept of the one before may go. From any thread."""
        generation = self._generation
        if generation is not None and generation.shard.undo is not None:
            generation.shard.undo.acknowledge(commit)

    def abort(self, reason: str) -> None:
        """Ends a wait for peers at once, and one for the device process within 100 ms. From any thread."""
        self._abort_reason = reason
        generation = self._generation
        if generation is not None:
            generation.mesh.abort(reason)

    def _raise_if_aborted(self) -> None:
        if self._abort_reason is not None:
            raise ChannelError(f"The driver ended this generation: {self._abort_reason}.")
        if self._generation is not None:
            self._generation.shard.raise_if_damaged()

    def close(self) -> None:
        """Frees sockets, shared memory, files and threads. Safe to call twice."""
        if self._generation is not None:
            self._generation.close()

    @property
    def _present(self) -> HostGeneration:
        if self._generation is None:
            raise RuntimeError("The host belongs to no generation. Expected start first.")
        return self._generation
