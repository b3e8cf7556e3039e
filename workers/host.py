"""`HostWorker`: what one host does. It owns a shard of every table with its slots, its lanes of the input, and its files.

A plain class: an actor wraps it on a cluster, a thread runs it in one process. It never touches JAX. One thread works (`start`, `connect`,
`restore`, `train`, `evaluate`, `begin_save`, `close`); another one may be in `write_save` meanwhile (`workers.background_save`); `status` and
`abort` may be called from a third at any time. The driver names steps, not data: reading, exchange and handover follow from the step's number.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embedding.activation_layout import ActivationLayout, pooling_owners
from embedding.lookup import FeatureBinding, Prepared, ShardedLookup
from embedding.optimizers import learning_rate_at
from embedding.pooled_lookup import PooledLookup, PooledRequest, can_pool_at_owner
from embedding.table_spec import TableSpec
from workers.background_save import BackgroundSave
from workers.batch import Batch
from workers.exchange import Mesh, MeshOptions
from workers.frames import Tag
from workers.handover import HandoverEnd, HandoverError, HandoverLayout, HandoverServer, Invitation, Record, RecordKind
from workers.handshake import MeshIdentity
from workers.input import evaluation_plan, training_plan
from workers.input_index import InputIndex
from workers.job import JobConfig, JobReference
from workers.neighbours import Neighbour, meet
from workers.progress import Progress, Tracker
from workers.read_ahead import ReadAhead
from workers.shards import ShardReceipt, TableFiles, read_shard
from workers.sources import open_reader
from workers.storage import Store
from workers.tables import feature_bindings, table_specs

READ_AHEAD_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """All that a host needs to know of a generation.

    Attributes:
      job: the declared job, or the function that returns it.
      run_id, generation, token, plan_hash: what peers must agree on.
      host, num_hosts: this host's number, from 0, and how many there are.
      lanes: per host, the lanes that it reads.
      table_buckets: per table, the number of buckets.
      placement: per table, int32 `[num_buckets]`, the owner of each bucket.
      storage_url: folder of the run.
      train_index, eval_index: the data's files; no evaluation without the latter.
      bind_address: where the mesh listens; an actor replaces an empty one by its machine's address.
      step_timeout_s: longest wait for a peer or the device within a step.
      tracks_changes: whether saves may be deltas.
    """

    job: JobConfig | JobReference
    run_id: str
    generation: int
    token: bytes
    plan_hash: bytes
    host: int
    num_hosts: int
    lanes: tuple[range, ...]
    table_buckets: tuple[int, ...]
    placement: tuple[np.ndarray, ...]
    storage_url: str
    train_index: InputIndex
    eval_index: InputIndex | None
    bind_address: str
    step_timeout_s: float
    tracks_changes: bool = False

    def resolve_job(self) -> JobConfig:
        return self.job.resolve() if isinstance(self.job, JobReference) else self.job


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReady:
    """A started host. `shard_bytes` counts rows and slots, `save_bytes` the memory that saving them takes beside them."""

    mesh_address: tuple[str, int]
    invitation: Invitation
    num_samples: int
    process: int
    hostname: str
    shard_bytes: int
    save_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWindow:
    """What a host did in one window of steps.

    Attributes:
      num_samples: samples trained, without padding.
      phase_s: seconds of each phase.
      bytes_sent: payload on the mesh.
      peak_rss_bytes: of the process, since its start.
    """

    num_samples: int
    phase_s: dict[str, float]
    bytes_sent: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredSamples:
    """Evaluation samples of one host: float32 arrays `[n]`, padding left out."""

    scores: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


@dataclass(slots=True, eq=False)
class _Step:
    """A batch on its way through the step."""

    number: int
    batch: Batch
    prepared: Prepared
    request: PooledRequest
    weight_sum: float


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

    def start(self, spec: HostSpec) -> HostReady:
        """Allocates the shard and listens for peers and for the device process.

        Raises:
          MemoryError: the shard does not fit.
          InputError, JobError, OSError: the data, the job or the address cannot be used.
        """
        job = spec.resolve_job()
        self._spec, self._job = spec, job
        self._specs: tuple[TableSpec, ...] = table_specs(job, spec.table_buckets)
        self._features: tuple[FeatureBinding, ...] = feature_bindings(job)
        self._store = Store(spec.storage_url)
        plan = training_plan(spec.train_index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed)
        self._reader = open_reader(job.resolved_data, spec.train_index, plan, spec.lanes[spec.host])
        # Every host hands its device the same shape: the largest share, padded with weight 0.
        num_samples = max(len(lanes) for lanes in spec.lanes) * plan.rows_per_lane_step
        self._build_lookups(num_samples)
        layout = HandoverLayout(num_dense=len(job.data.dense), activations=self._layout)
        self._server = HandoverServer(layout, generation=spec.generation)
        identity = MeshIdentity(
            run_id=spec.run_id,
            generation=spec.generation,
            token=spec.token,
            rank=spec.host,
            num_ranks=spec.num_hosts,
            plan_hash=spec.plan_hash,
        )
        self._mesh = Mesh.listen(identity, bind_address=spec.bind_address, options=MeshOptions())
        return HostReady(
            mesh_address=self._mesh.address,
            invitation=self._server.invitation,
            num_samples=num_samples,
            process=os.getpid(),
            hostname=socket.gethostname(),
            shard_bytes=sum(table.size_bytes for table in self._lookup.tables),
            save_bytes=self._save.size_bytes,
        )

    def _build_lookups(self, num_samples: int) -> None:
        """Allocates the shard, and decides for each table what will cross the network: vectors pooled at its owner, or rows."""
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
        )
        self._pooled = PooledLookup(
            self._lookup.tables, self._features, self._layout, host=spec.host, num_hosts=spec.num_hosts
        )
        self._save = BackgroundSave(
            self._lookup.tables,
            tracker=self._tracker,
            # Peers wait for this host meanwhile, for twice as long.
            stalled_after_s=spec.step_timeout_s / 2,
            raise_if_aborted=self._raise_if_aborted,
            tracks_changes=spec.tracks_changes,
        )

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> None:
        """Joins the mesh and waits for the device process.

        Raises:
          MeshError: a peer is missing or refused us.
          HandoverTimeout: the device process did not come.
        """
        self._connected_mesh.connect(addresses, timeout_s=timeout_s)
        if self._server is None:
            raise RuntimeError("connect was called before start. Expected start first.")
        self._end = self._server.accept(timeout_s=timeout_s, keep_waiting=self._raise_if_aborted)
        self._neighbours = meet(self._connected_mesh, self._server.descriptor, self._end.layout, timeout_s=timeout_s)
        self._server.close_descriptor()
        for host, neighbour in self._neighbours.items():
            arrays = neighbour.arrays
            self._pooled.share(host, activations=arrays["activations"], gradients=arrays["gradients"])

    def restore(self, tables: Sequence[TableFiles] | None) -> None:
        """Fills the shard from a commit, or with first values.

        Raises:
          StorageError, ChunkDamaged: a file is missing or is not what was committed.
        """
        with self._tracker.phase("restore"):
            if tables is None:
                for table in self._lookup.tables:
                    table.initialize()
                    self._tracker.mark()
            else:
                read_shard(self._store, self._lookup.tables, tables, on_chunk=self._tracker.mark)
                self._save.track(tables)

    def train(self, first_step: int, last_step: int) -> HostWindow:
        """Runs steps `first_step` to `last_step - 1`.

        Raises:
          MeshError, HandoverError: a peer or the device process is gone or silent.
          InputError: the data cannot be read, or holds a value that its declaration refuses.
        """
        reader = self._reading(first_step)
        sent_before = self._connected_mesh.statistics.bytes_sent
        num_samples = 0
        self._tracker.take_phase_s()
        upcoming = self._prepare(reader, first_step)
        for number in range(first_step, last_step):
            step = upcoming
            self._tracker.begin_step(number)
            self._forward(step, RecordKind.TRAIN)
            if number + 1 < last_step:
                # Ids of the next step need no updated row, so they travel while the device works.
                upcoming = self._prepare(reader, number + 1)
            self._await_device(step)
            self._backward(step)
            num_samples += int(np.count_nonzero(~step.batch.is_padding))
            self._tracker.finish_step()
        self._device.send(Record(kind=RecordKind.END, step=last_step))
        return HostWindow(
            num_samples=num_samples,
            phase_s=self._tracker.take_phase_s(),
            bytes_sent=self._connected_mesh.statistics.bytes_sent - sent_before,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def evaluate(self) -> ScoredSamples:
        """Scores this host's lanes of the evaluation data, each sample once. Changes no row.

        Raises:
          As `train`.
        """
        spec, job = self._spec, self._job
        if spec.eval_index is None:
            raise RuntimeError("No evaluation data is declared. Expected eval_paths in ParquetData.")
        plan = evaluation_plan(spec.eval_index, num_lanes=job.num_lanes, batch_size=job.batch_size)
        lanes = open_reader(job.resolved_data.for_evaluation(), spec.eval_index, plan, spec.lanes[spec.host])
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        with ReadAhead(lanes, first_step=0, depth=READ_AHEAD_BATCHES) as reader:
            for number in range(plan.steps_per_epoch):
                step = self._prepare(reader, number)
                self._forward(step, RecordKind.EVALUATE)
                self._await_device(step)
                real = np.flatnonzero(~step.batch.is_padding)
                scores = self._device.buffers[0]["scores"][real]
                parts.append((scores, step.batch.labels[real], step.batch.weights[real]))
                self._tracker.mark()
        self._device.send(Record(kind=RecordKind.END, step=0))
        scores, labels, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ScoredSamples(scores=scores, labels=labels, weights=weights)

    def begin_save(self) -> None:
        """Makes the present moment the one that `write_save` writes. Takes no time."""
        self._save.freeze()

    def write_save(self, attempt: str, is_delta: bool) -> ShardReceipt:
        """Writes this host's buckets, as they were at `begin_save`, below `data/<attempt>`. From a thread of its own, while another trains.

        Args:
          is_delta: only the rows that changed since the save before, or since `restore`; wants `HostSpec.tracks_changes`.

        Raises:
          StorageError: the storage failed or held such files already.
        """
        return self._save.write(self._store, attempt, is_first=self._spec.host == 0, is_delta=is_delta)

    def status(self) -> Progress:
        """Where the working thread is. From any thread."""
        return self._tracker.progress()

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

    def _prepare(self, reader: ReadAhead, number: int) -> _Step:
        """Reads a batch, finds the rows of its ids, and tells the owners which are wanted."""
        with self._tracker.phase("read"):
            batch = reader.get(number)
        with self._tracker.phase("dedup"):
            prepared = self._lookup.prepare(batch.features)
            request = self._pooled.request(batch.features)
        weight = float(batch.weights.sum(dtype=np.float64))
        with self._tracker.phase("id exchange"):
            frames, weight_sum = self._exchange_ids(number, prepared, request, weight)
        with self._tracker.phase("group"):
            self._pooled.accept(request, frames, self._device.buffers[0]["gradients"])
        return _Step(number=number, batch=batch, prepared=prepared, request=request, weight_sum=weight_sum)

    def _exchange_ids(
        self, number: int, prepared: Prepared, request: PooledRequest, weight: float
    ) -> tuple[list[np.ndarray], float]:
        """Sends each owner the rows asked of it, with the weight of this host's samples.

        Returns:
          Per host the frame of its `PooledRequest`, and the weight of the global batch.
        """
        spec, num_tables = self._spec, len(self._specs)
        head = np.empty((spec.num_hosts, num_tables + 1), np.int64)
        head[:, 0] = np.float64(weight).view(np.int64)
        head[:, 1:] = prepared.asked_counts
        frames: dict[int, np.ndarray] = {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            if num_bytes % 8 or num_bytes < 8 * (num_tables + 1):
                raise ValueError(
                    f"Host {host} sent {num_bytes} bytes of ids. Expected whole int64 with {num_tables + 1} in front."
                )
            frames[host] = np.empty(num_bytes // 8, np.int64)
            return frames[host]

        send = [[head[h], prepared.asked[h], request.frames[h]] for h in range(spec.num_hosts)]
        self._exchange(Tag.IDS, number, send, receive)
        heads = head.copy()
        wanted = [np.empty(0, np.int64)] * spec.num_hosts
        pooled = [np.empty(0, np.int64)] * spec.num_hosts
        for host, frame in frames.items():
            heads[host] = frame[: num_tables + 1]
            num_rows = int(heads[host, 1:].sum())
            wanted[host], pooled[host] = np.split(frame[num_tables + 1 :], [num_rows])
        self._lookup.accept(prepared, wanted, np.ascontiguousarray(heads[:, 1:]))
        # In host order, so that every host finds the same sum.
        return pooled, float(heads[:, 0].view(np.float64).sum())

    def _forward(self, step: _Step, kind: RecordKind) -> None:
        """Activations into the shared memory, from rows that come here and from vectors pooled at their owners; then it is the device's turn."""
        arrays = self._device.buffers[0]
        activations = arrays["activations"]
        with self._tracker.phase("gather"):
            self._lookup.gather(step.prepared)
        with self._tracker.phase("row exchange"):
            self._exchange_pieces(Tag.ROWS, step, send="served", receive="rows")
        with self._tracker.phase("pool for others"):
            self._pooled.pool_for_others(step.request)
        self._begin_pooled(Tag.ROWS, step, self._pooled.answer, lambda host: activations[self._layout.region(host)])
        # The own part is combined while the others' vectors travel.
        with self._tracker.phase("pool"):
            self._pooled.pool_own(step.request, activations)
            self._pool_rows(step, arrays)
        with self._tracker.phase("activation exchange"):
            self._finish_pooled()
        self._device.send(Record(kind=kind, step=step.number, weight_sum=step.weight_sum))

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
                f"The device process answered {answer.kind.name} for step {answer.step}. Expected DONE for step {step.number}."
            )

    def _backward(self, step: _Step) -> None:
        """Gradients of this host's samples to the owners of the rows, then one update of each touched row."""
        gradients = self._device.buffers[0]["gradients"]
        rates = [_learning_rate(spec, step.number) for spec in self._specs]
        self._begin_pooled(
            Tag.GRADIENTS, step, lambda host: gradients[self._layout.region(host)], self._pooled.gradient_memory
        )
        with self._tracker.phase("gradient sum"):
            self._lookup.sum_gradients(step.prepared, self._blocks(gradients))
        with self._tracker.phase("gradient exchange"):
            self._finish_pooled()
            self._exchange_pieces(Tag.GRADIENTS, step, send="rows", receive="served")
        with self._tracker.phase("update"):
            self._lookup.update(step.prepared, rates)
            self._pooled.update(step.request, gradients, rates)

    def _begin_pooled(
        self, tag: Tag, step: _Step, send: Callable[[int], np.ndarray], receive: Callable[[int], np.ndarray]
    ) -> None:
        """Starts to exchange pooled vectors or their gradients, if any feature has them.

        A neighbour gets and sends an empty frame: its vectors are in its memory already. It says that they are complete there, or that its
        gradients are, and with the frames of the next exchange that nobody reads them any more.
        """
        if not self._pooled.is_used:
            return

        def place(host: int, num_bytes: int) -> np.ndarray:
            memory = np.empty(0, np.float32) if host in self._neighbours else receive(host)
            if memory.nbytes != num_bytes:
                raise ValueError(f"Host {host} sent {num_bytes} bytes. Expected {memory.nbytes}, as both planned.")
            return memory

        silent = {self._spec.host, *self._neighbours}
        frames = [[] if host in silent else [send(host)] for host in range(self._spec.num_hosts)]
        self._connected_mesh.begin(tag=tag, step=step.number, send=frames, receive=place)

    def _finish_pooled(self) -> None:
        if self._pooled.is_used:
            self._connected_mesh.finish(timeout_s=self._spec.step_timeout_s)

    def _exchange_pieces(self, tag: Tag, step: _Step, *, send: str, receive: str) -> None:
        lookup, hosts = self._lookup, range(self._spec.num_hosts)
        for group in range(len(lookup.groups)):

            def place(host: int, num_bytes: int, group: int = group) -> np.ndarray:
                piece = lookup.piece(step.prepared, group, host, of=receive)
                if piece.nbytes != num_bytes:
                    raise ValueError(f"Host {host} sent {num_bytes} bytes. Expected {piece.nbytes}, as asked for.")
                return piece

            frames = [[lookup.piece(step.prepared, group, host, of=send)] for host in hosts]
            self._exchange(tag, step.number, frames, place)

    def _exchange(self, tag: Tag, number: int, send, receive) -> None:
        self._connected_mesh.exchange(
            tag=tag, step=number, send=send, receive=receive, timeout_s=self._spec.step_timeout_s
        )

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


def _learning_rate(spec: TableSpec, step: int) -> float:
    return 0.0 if spec.optimizer is None else learning_rate_at(spec.optimizer.learning_rate, step)
