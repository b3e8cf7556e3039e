"""`HostWorker`: what one host does. It owns a shard of every table with its slots, its lanes of the input, and its
files.

A plain class: an actor wraps it on a cluster, a thread runs it in one process. It never touches JAX. One thread works
(`start`, `rejoin`, `connect`, `restore`, `train`, `evaluate`, `begin_save`, `close`); another one may be in
`write_save` meanwhile (`workers.checkpoint.background_save`); `status`, `acknowledge` and `abort` may be called from a
third at any time. The driver names steps, not data: reading, exchange and handover follow from the step's number.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from podembed.embedding.lookup.activation_layout import ActivationLayout, pooling_owners
from podembed.embedding.lookup.compiled import compile_kernels
from podembed.embedding.lookup.owner_pooled import PooledLookup, PooledRequest, can_pool_at_owner
from podembed.embedding.lookup.prefetch import Part
from podembed.embedding.lookup.sharded import FeatureBinding, Prepared, ShardedLookup
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.background_save import BackgroundSave
from podembed.workers.checkpoint.shard import ShardReceipt, TableFiles
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.batch import Batch
from podembed.workers.device.shared_memory import (
    HandoverEnd,
    HandoverError,
    HandoverLayout,
    HandoverServer,
    Record,
    RecordKind,
)
from podembed.workers.faults.frames import frame_spoiler
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.faults.storage import with_faults
from podembed.workers.faults.updates import arm_updates
from podembed.workers.host.ids import Early, IdExchange
from podembed.workers.host.restore import fill_shard
from podembed.workers.host.same_machine import Neighbour, meet
from podembed.workers.host.spec import HostReady, HostSpec, HostWindow, ScoredSamples
from podembed.workers.host.surviving_shard import Filled, HeldRows
from podembed.workers.host.vectors import Splits, VectorExchange
from podembed.workers.host.warm_start import TableStart, begin_tables
from podembed.workers.input.read_ahead import ReadAhead
from podembed.workers.input.reader import evaluation_plan
from podembed.workers.input.sources import job_plan, open_reader
from podembed.workers.job.sample_losses import sample_losses
from podembed.workers.job.tables import feature_bindings, learning_rates, table_specs
from podembed.workers.liveness.progress import DEVICE_PHASE, Progress, Tracker, is_waiting_phase
from podembed.workers.liveness.worker import Worker
from podembed.workers.mesh.handshake import MeshIdentity
from podembed.workers.mesh.mesh import Mesh, MeshOptions
from podembed.workers.storage.store import Store

READ_AHEAD_BATCHES = 4
# A survivor of a fault that is still reading input after so long is not waited for.
LEAVE_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class _Step:
    """A batch on its way through the step.

    Attributes:
      buffer: of the memory shared with the device process.
      tries_early: what any host found early vectors of in the step before; the same on all hosts.
      early_rows, early_pooled: by host, what that host sent ahead of the update of the step before.
    """

    number: int
    buffer: int
    batch: Batch
    prepared: Prepared
    request: PooledRequest
    weight_sum: float
    tries_early: Early
    early_rows: Splits = field(default_factory=dict)
    early_pooled: Splits = field(default_factory=dict)


class HostWorker:
    """One host of a generation. See the module for threads."""

    def __init__(self) -> None:
        self._tracker = Tracker()
        self._mesh: Mesh | None = None
        self._server: HandoverServer | None = None
        self._end: HandoverEnd | None = None
        self._abort_reason: str | None = None
        self._read_ahead: ReadAhead | None = None
        self._neighbours: dict[int, Neighbour] = {}
        self._looked_up: _Step | None = None
        self._found_early = Early.ROWS | Early.POOLED
        self._undo: Undo | None = None

    def start(self, spec: HostSpec) -> HostReady:
        """Allocates the shard and listens for peers and for the device process.

        Raises:
          MemoryError: the shard does not fit.
          InputError, JobError, OSError: the data, the job or the address cannot be used.
        """
        return self._begin(spec, None)

    def rejoin(self, spec: HostSpec) -> HostReady:
        """Leaves a generation that was aborted and begins another one, with what is here of the rows of `spec.base`.

        The tables go back to that commit as far as the way back reaches; `restore` verifies that and reads the rest.

        Raises:
          As `start`; ReadAheadError: the storage holds up a read of the old generation.
        """
        # The driver waits for the answer to `abort` before it calls this; a later one is meant for the new generation.
        self._abort_reason = None
        if not hasattr(self, "_lookup"):
            # It was lost sight of before it had begun.
            self.close()
            return self._begin(spec, None)
        self._tracker.take_phase_s()
        with self._tracker.phase("undo"):
            known = self._undo.back_to(spec.base or "") if self._undo is not None else None
            if known is not None:
                self._held = HeldRows(spec.base or "", known)
            elif self._held.commit != spec.base:
                self._held = HeldRows.none_of(self._lookup.tables)
            tables = [*self._lookup.tables]
            self._leave_generation()
            specs = table_specs(spec.resolve_job(), spec.table_buckets)
            tables = self._held.recut(tables, specs, spec.placement, host=spec.host, undo_share=spec.undo_share)
        return self._begin(spec, tables)

    def _leave_generation(self) -> None:
        """Frees all that belongs to a generation, but for the rows."""
        for table in self._lookup.tables:
            # It leads to all tables, so that none could go before the last one is cut anew.
            table.before_change = None
        if self._read_ahead is not None:
            self._read_ahead.close(deadline_s=LEAVE_TIMEOUT_S)
            self._read_ahead = None
        else:
            self._reader.close()
        self.close()
        self._mesh = self._server = self._end = self._looked_up = self._undo = None
        self._found_early = Early.ROWS | Early.POOLED
        self._neighbours = {}
        # Each of them leads to the tables, which are cut anew one by one.
        for name in ("_lookup", "_pooled", "_save", "_ids", "_vectors"):
            self.__dict__.pop(name, None)

    def settle(self) -> None:
        """Answers when the calls before it have ended, well or not; this is how a driver knows that a host is free
        again.
        """

    def _begin(self, spec: HostSpec, held: Sequence[Table] | None) -> HostReady:
        """Builds all that belongs to a generation, around tables that are here already or around new ones."""
        job = spec.resolve_job()
        self._spec, self._job = spec, job
        self._specs: tuple[TableSpec, ...] = table_specs(job, spec.table_buckets)
        self._features: tuple[FeatureBinding, ...] = feature_bindings(job)
        self._tracker.faults = faults = FaultPoints.of(spec.fault_plan, str(Worker("host", spec.host)))
        self._tracker.point("start.begin")
        self._store = with_faults(Store(spec.storage_url), faults)
        plan = job_plan(job, spec.train_index)
        self._bad_rows = BadRowLog(job.data.max_bad_rows)
        lanes = spec.lanes[spec.host]
        self._reader = open_reader(job.resolved_data, spec.train_index, plan, lanes, bad_rows=self._bad_rows)
        # Every host hands its device the same shape: the largest share, padded with weight 0.
        num_samples = max(len(lanes) for lanes in spec.lanes) * plan.rows_per_lane_step
        self._build_lookups(num_samples, held)
        arm_updates(self._lookup.tables, faults, lambda: self._tracker.progress().step)
        compile_kernels(self._specs)
        layout = HandoverLayout(num_dense=len(job.data.dense), activations=self._layout, num_buffers=self._num_buffers)
        self._server = HandoverServer(layout, generation=spec.generation)
        identity = MeshIdentity(
            run_id=spec.run_id,
            generation=spec.generation,
            token=spec.token,
            rank=spec.host,
            num_ranks=spec.num_hosts,
            plan_hash=spec.plan_hash,
        )
        self._mesh = Mesh.listen(
            identity, bind_address=spec.bind_address, options=MeshOptions(spoil=frame_spoiler(faults))
        )
        self._tracker.point("start.ready")
        return HostReady(
            mesh_address=self._mesh.address,
            invitation=self._server.invitation,
            num_samples=num_samples,
            process=os.getpid(),
            hostname=socket.gethostname(),
            shard_bytes=sum(table.size_bytes for table in self._lookup.tables),
            save_bytes=self._save.size_bytes,
        )

    def _build_lookups(self, num_samples: int, held: Sequence[Table] | None) -> None:
        """Allocates the shard, and decides for each table what will cross the network: vectors pooled at its owner, or
        rows.
        """
        self._rows_asked = np.zeros(len(self._specs), np.int64)
        spec = self._spec
        whole = pooling_owners(spec.placement)
        owners = [owner if can_pool_at_owner(table) else -1 for owner, table in zip(whole, self._specs, strict=True)]
        elsewhere = {at for at, owner in enumerate(owners) if owner >= 0}
        self._layout = ActivationLayout(
            num_samples=num_samples,
            widths=tuple(self._job.widths.values()),
            owners=tuple(owners[feature.table] for feature in self._features),
        )
        self._lookup = ShardedLookup(
            self._specs,
            self._features,
            spec.placement,
            host=spec.host,
            num_hosts=spec.num_hosts,
            elsewhere=elsewhere,
            tables=held,
        )
        if held is None:
            self._held = HeldRows.none_of(self._lookup.tables)
        self._undo = Undo(self._lookup.tables, share=spec.undo_share) if spec.undo_share else None
        self._pooled = PooledLookup(
            self._lookup.tables,
            self._features,
            self._layout,
            host=spec.host,
            num_hosts=spec.num_hosts,
            num_buffers=self._num_buffers,
        )
        self._save = BackgroundSave(
            self._lookup.tables,
            tracker=self._tracker,
            # Peers wait for this host meanwhile, for twice as long.
            stalled_after_s=spec.step_timeout_s / 2,
            raise_if_aborted=self._raise_if_aborted,
            tracks_changes=spec.tracks_changes,
            undo=self._undo,
        )

    @property
    def _num_buffers(self) -> int:
        """Where the lookup of a step begins before the device is done with the one before, each has memory of its
        own.
        """
        return 2 if self._job.overlap or self._job.staleness else 1

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> tuple[str, ...]:
        """Joins the mesh and waits for the device process. Returns a line for each connection that was not let in.

        Raises:
          MeshError: a peer is missing or refused us.
          HandoverTimeout: the device process did not come.
        """
        self._raise_if_aborted()
        self._connected_mesh.connect(addresses, timeout_s=timeout_s)
        if self._server is None:
            raise RuntimeError("connect was called before start. Expected start first.")
        self._end = self._server.accept(timeout_s=timeout_s, keep_waiting=self._raise_if_aborted)
        if self._spec.shares_memory:
            self._neighbours = meet(
                self._connected_mesh, self._server.descriptor, self._end.layout, timeout_s=timeout_s
            )
        self._server.close_descriptor()
        for host, neighbour in self._neighbours.items():
            activations, gradients = (
                [arrays[name] for arrays in neighbour.buffers] for name in ("activations", "gradients")
            )
            self._pooled.share(host, activations=activations, gradients=gradients)
        self._ids = IdExchange(self._connected_mesh, timeout_s=self._spec.step_timeout_s)
        self._vectors = VectorExchange(
            self._connected_mesh,
            self._lookup,
            self._pooled,
            self._layout,
            neighbours=self._neighbours.keys(),
            wire_dtype=self._job.wire_dtype,
            timeout_s=self._spec.step_timeout_s,
        )
        return tuple(
            f"host {self._spec.host} refused {refused}" for refused in self._connected_mesh.describe_refusals()
        )

    def restore(self, tables: Sequence[TableFiles] | None) -> Filled:
        """Fills the shard from a commit, or with first values. What this host or another one holds of the commit is
        verified instead of read.

        Raises:
          StorageError, ChunkDamaged: a file is missing or is not what was committed.
          MeshError: a peer is gone or silent.
        """
        with self._tracker.phase("restore"):
            filled = fill_shard(
                self._held,
                self._lookup.tables,
                tables,
                spec=self._spec,
                mesh=self._connected_mesh,
                store=self._store,
                tracker=self._tracker,
                check=self._raise_if_aborted,
                neighbours=self._neighbours.keys(),
            )
            # From here on the way back knows.
            self._held = HeldRows.none_of(self._lookup.tables)
            if tables is not None:
                self._save.track(tables, self._spec.base or "")
        return filled

    def warm_start(self, location: str, starts: Sequence[TableStart]) -> None:
        """Fills the shard with what a new run begins from.

        Args:
          location: folder of the run whose files are read.
          starts: one a table, in the job's order.

        Raises:
          StorageError, ChunkDamaged: a file is missing or is not what was committed.
        """
        with self._tracker.phase("restore"):
            begin_tables(Store(location), self._lookup.tables, starts, on_chunk=self._tracker.mark)

    def train(self, first_step: int, last_step: int, is_followed: bool = False) -> HostWindow:
        """Runs steps `first_step` to `last_step - 1`.

        Args:
          is_followed: whether training goes on from `last_step` without a commit in between. With staleness, that step
            is then looked up before the last update of this window, as within a window, so that numbers do not depend
            on where windows end.

        Raises:
          MeshError, HandoverError: a peer or the device process is gone or silent.
          InputError: the data cannot be read, or holds a value that its declaration refuses.
        """
        reader = self._reading(first_step)
        sent_before = self._connected_mesh.statistics.bytes_sent
        num_samples = 0
        self._rows_asked[:] = 0
        self._tracker.take_phase_s()
        looks_ahead = is_followed and self._job.staleness > 0
        upcoming = self._first_lookup(reader, first_step)
        self._announce(upcoming, RecordKind.TRAIN)
        for number in range(first_step, last_step):
            step, is_last = upcoming, number + 1 == last_step
            self._tracker.begin_step(number)
            if not is_last or looks_ahead:
                # Ids of the next step need no updated row, so they travel while the device works.
                upcoming = self._prepare(reader, number + 1)
                self._look_up_ahead(upcoming, step)
                if self._job.staleness and not is_last:
                    self._announce(upcoming, RecordKind.TRAIN)
            self._await_device(step)
            self._backward(step)
            if not self._job.staleness and not is_last:
                self._forward(upcoming)
                self._announce(upcoming, RecordKind.TRAIN)
            num_samples += int(np.count_nonzero(~step.batch.is_padding))
            self._tracker.finish_step()
        self._looked_up = upcoming if looks_ahead else None
        self._device.send(Record(kind=RecordKind.END, step=last_step))
        self._tracker.point("step.end_of_window")
        return HostWindow(
            num_samples=num_samples,
            phase_s=self._tracker.take_phase_s(),
            bytes_sent=self._connected_mesh.statistics.bytes_sent - sent_before,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            rows_asked=tuple(int(rows) for rows in self._rows_asked),
            bad_rows=self._bad_rows.take(),
        )

    def _first_lookup(self, reader: ReadAhead, number: int) -> _Step:
        """The first step of a window: looked up by the window before, or now, with every update in the tables."""
        step, self._looked_up = self._looked_up, None
        if step is None:
            step = self._prepare(reader, number)
            self._forward(step)
        elif step.number != number:
            raise RuntimeError(
                f"Found step {number} asked for after step {step.number} was looked up. Expected that one."
            )
        return step

    def _look_up_ahead(self, step: _Step, previous: _Step) -> None:
        """What may be looked up before the update of `previous`: with staleness everything, else what that update will
        not change.
        """
        if self._job.staleness:
            self._forward(step)
        elif self._job.overlap:
            self._forward_early(step, previous)

    def evaluate(self) -> ScoredSamples:
        """Scores this host's lanes of the evaluation data, each sample once. Changes no row.

        Raises:
          As `train`.
        """
        spec, job = self._spec, self._job
        if spec.eval_index is None:
            raise RuntimeError("No evaluation data is declared. Expected eval_paths in the job's data.")
        plan = evaluation_plan(spec.eval_index, num_lanes=job.num_lanes, batch_size=job.batch_size)
        data = job.resolved_data.for_evaluation()
        lanes = open_reader(data, spec.eval_index, plan, spec.lanes[spec.host], bad_rows=self._bad_rows)
        parts: list[tuple[np.ndarray, ...]] = []
        group_features, losses_of = job.group_features, sample_losses(job.loss)
        # The memory of a training step that is already looked up is not touched.
        buffer = 1 - self._looked_up.buffer if self._looked_up else 0
        with ReadAhead(lanes, first_step=0, depth=READ_AHEAD_BATCHES) as reader:
            for number in range(plan.steps_per_epoch):
                step = self._prepare(reader, number, buffer=buffer)
                self._forward(step)
                self._announce(step, RecordKind.EVALUATE)
                self._await_device(step)
                real = np.flatnonzero(~step.batch.is_padding)
                labels = step.batch.labels
                # All devices of a gang have the room of the host with most lanes.
                scores = self._device.buffers[buffer]["scores"][: len(labels)]
                columns = (scores, labels, step.batch.weights, losses_of(scores, labels))
                groups = [step.batch.only_ids(name, real) for name in group_features]
                parts.append((*(column[real] for column in columns), *groups))
                self._tracker.mark()
        self._device.send(Record(kind=RecordKind.END, step=0))
        scores, labels, weights, losses, *groups = (np.concatenate(column) for column in zip(*parts, strict=True))
        named = dict(zip(group_features, groups, strict=True))
        bad_rows = self._bad_rows.take()
        return ScoredSamples(
            scores=scores, labels=labels, weights=weights, losses=losses, groups=named, bad_rows=bad_rows
        )

    def begin_save(self, attempt: str = "", before_failed: bool = False) -> None:
        """Makes the present moment the one that `write_save` writes, as the commit `attempt`. Takes no time.

        Args:
          before_failed: the save before did not become a commit.
        """
        self._tracker.point("save.begin")
        self._save.freeze(attempt, before_failed=before_failed)

    def write_save(self, attempt: str, is_delta: bool) -> ShardReceipt:
        """Writes this host's buckets, as they were at `begin_save`, below `data/<attempt>`. From a thread of its own,
        while another trains.

        Args:
          is_delta: only the rows that changed since the save before, or since `restore`; wants
            `HostSpec.tracks_changes`.

        Raises:
          StorageError: the storage failed or held such files already.
        """
        return self._save.write(self._store, attempt, is_first=self._spec.host == 0, is_delta=is_delta)

    def status(self) -> Progress:
        """Where the working thread is, and for whom it waits. From any thread."""
        progress, mesh = self._tracker.progress(), self._mesh
        if progress.phase == DEVICE_PHASE:
            progress = replace(progress, waits_for=(Worker("device", self._spec.host),))
        elif mesh is not None and is_waiting_phase(progress.phase):
            progress = replace(progress, waits_for=tuple(Worker("host", rank) for rank in mesh.waiting_for))
        return progress if mesh is None else replace(progress, unheard_s=mesh.unheard_s)

    def acknowledge(self, commit: str) -> None:
        """The commit stands: what the way back to the one before needed may go. From any thread."""
        undo = self._undo
        if undo is not None:
            undo.acknowledge(commit)

    def abort(self, reason: str) -> None:
        """Ends a wait for peers at once, and one for the device process within 100 ms. From any thread."""
        self._abort_reason = reason
        if self._mesh is not None:
            self._mesh.abort(reason)

    def _raise_if_aborted(self) -> None:
        if self._abort_reason is not None:
            raise HandoverError(f"The driver ended this generation: {self._abort_reason}.")

    def close(self) -> None:
        """Frees sockets, shared memory, files and threads. Safe to call twice."""
        if self._read_ahead is not None:
            self._read_ahead.close()
            self._read_ahead = None
        if self._end is not None:
            self._end.close()
        if self._server is not None:
            self._server.close()
        if self._mesh is not None:
            self._mesh.close()

    # ------------------------------------------------------------------ the parts of a step

    def _prepare(self, reader: ReadAhead, number: int, *, buffer: int | None = None) -> _Step:
        """Reads a batch, finds the rows of its ids, and tells the owners which are wanted. Steps of training take the
        buffers in turn.
        """
        buffer = number % self._num_buffers if buffer is None else buffer
        with self._tracker.phase("read"):
            batch = reader.get(number)
        with self._tracker.phase("dedup"):
            prepared = self._lookup.prepare(batch.features)
            request = self._pooled.request(batch.features, buffer=buffer)
        weight = float(batch.weights.sum(dtype=np.float64))
        with self._tracker.phase("id exchange"):
            asked = self._ids.exchange(number, prepared, request, weight=weight, found_early=self._found_early)
            self._lookup.accept(prepared, asked.wanted, asked.wanted_counts)
            self._rows_asked += asked.wanted_counts.sum(axis=0)
        with self._tracker.phase("group"):
            self._pooled.accept(request, asked.frames, self._device.buffers[buffer]["gradients"])
        return _Step(
            number=number,
            buffer=buffer,
            batch=batch,
            prepared=prepared,
            request=request,
            weight_sum=asked.weight_sum,
            tries_early=asked.found_early,
        )

    def _forward_early(self, step: _Step, previous: _Step) -> None:
        """The part of `_forward` that no gradient of `previous`, the step that the device works on, will change."""
        found = Early.NONE
        if Early.ROWS in step.tries_early and self._lookup.groups:
            with self._tracker.phase("split"):
                self._lookup.split(step.prepared, previous.prepared)
            with self._tracker.phase("early gather"):
                self._lookup.gather(step.prepared, Part.EARLY)
            with self._tracker.phase("early exchange"):
                step.early_rows = self._vectors.early_rows(step.prepared, step.number)
            found |= Early.ROWS if any(step.prepared.splits) else Early.NONE
        if Early.POOLED in step.tries_early and self._pooled.is_used:
            activations = self._device.buffers[step.buffer]["activations"]
            with self._tracker.phase("split"):
                self._pooled.split(step.request, previous.request)
            with self._tracker.phase("early pool"):
                self._pooled.pool_for_others(step.request, Part.EARLY)
                self._vectors.begin_early_pooled(step.request, step.number, activations)
                self._pooled.pool_own(step.request, activations, Part.EARLY)
            with self._tracker.phase("early exchange"):
                step.early_pooled = self._vectors.finish_early_pooled(activations)
            found |= Early.POOLED if any(step.request.splits) else Early.NONE
        self._found_early = found

    def _forward(self, step: _Step) -> None:
        """Activations into the shared memory, from rows that come here and from vectors pooled at their owners; what
        went early is done.
        """
        arrays = self._device.buffers[step.buffer]
        activations = arrays["activations"]
        with self._tracker.phase("gather"):
            self._lookup.gather(step.prepared)
        with self._tracker.phase("row exchange"):
            self._vectors.rows(step.prepared, step.number, step.early_rows)
        with self._tracker.phase("pool for others"):
            self._pooled.pool_for_others(step.request)
        self._vectors.begin_pooled(step.request, step.number, activations, step.early_pooled)
        # The own part is combined while the others' vectors travel.
        with self._tracker.phase("pool"):
            self._pooled.pool_own(step.request, activations)
            self._pool_rows(step, arrays)
        with self._tracker.phase("activation exchange"):
            self._vectors.finish_pooled()

    def _announce(self, step: _Step, kind: RecordKind) -> None:
        """Tells the device that its input is complete."""
        self._device.send(Record(kind=kind, step=step.number, buffer=step.buffer, weight_sum=step.weight_sum))

    def _pool_rows(self, step: _Step, arrays: Mapping[str, np.ndarray]) -> None:
        """What needs no other host any more: features whose rows came here, and the inputs of the dense half."""
        n = step.batch.num_samples
        blocks = self._blocks(arrays["activations"])
        self._lookup.pool(step.prepared, blocks)
        for feature in self._lookup.features:
            blocks[feature.name][n:] = 0.0
        for name in ("dense", "labels", "weights"):
            arrays[name][:n] = getattr(step.batch, name)
            arrays[name][n:] = 0.0

    def _blocks(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        blocks = self._layout.blocks(memory)
        return {feature.name: block for feature, block in zip(self._features, blocks, strict=True)}

    def _await_device(self, step: _Step) -> None:
        with self._tracker.phase("device"):
            answer = self._device.receive(timeout_s=self._spec.step_timeout_s, keep_waiting=self._raise_if_aborted)
        if answer.kind is not RecordKind.DONE or answer.step != step.number:
            raise RuntimeError(
                f"The device process answered {answer.kind.name} for step {answer.step}. Expected DONE for step "
                f"{step.number}."
            )

    def _backward(self, step: _Step) -> None:
        """Gradients of this host's samples to the owners of the rows, then one update of each touched row."""
        gradients = self._device.buffers[step.buffer]["gradients"]
        rates = learning_rates(self._specs, step.number)
        self._vectors.begin_pooled_gradients(step.number, gradients)
        with self._tracker.phase("gradient sum"):
            self._lookup.sum_gradients(step.prepared, self._blocks(gradients))
        with self._tracker.phase("gradient exchange"):
            self._vectors.finish_pooled()
            self._vectors.row_gradients(step.prepared, step.number)
        with self._tracker.phase("update"):
            self._lookup.update(step.prepared, rates)
            self._pooled.update(step.request, gradients, rates)

    def _reading(self, first_step: int) -> ReadAhead:
        """The training reader, standing at `first_step`."""
        if self._read_ahead is None:
            self._read_ahead = ReadAhead(self._reader, first_step=first_step, depth=READ_AHEAD_BATCHES).start()
        return self._read_ahead

    @property
    def _connected_mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("The host has no mesh. Expected start first.")
        return self._mesh

    @property
    def _device(self) -> HandoverEnd:
        if self._end is None:
            raise RuntimeError("The host has no device process. Expected connect first.")
        return self._end
