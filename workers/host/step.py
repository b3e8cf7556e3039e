"""`Steps`: the parts of one step on one host: prepare, forward, wait for the device, backward.

All hosts call them in the same order, since each exchanges something with every other host. What runs before what, in a
window of steps, is `workers.host.windows`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.lookup.owner_pooled import PooledRequest
from podembed.embedding.lookup.prefetch import Part
from podembed.embedding.lookup.sharded import Prepared
from podembed.workers.data.batch import Batch
from podembed.workers.device.shared_memory import HandoverEnd, Record, RecordKind
from podembed.workers.host.ids import Early, IdExchange
from podembed.workers.host.lookups import HostLookups
from podembed.workers.host.vectors import Splits, VectorExchange
from podembed.workers.input.read_ahead import ReadAhead
from podembed.workers.job.tables import learning_rates
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.mesh.mesh import Mesh


@dataclass(slots=True, eq=False)
class Step:
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


class Steps:
    """The steps of one host in one generation. Mutated: the tables, and the memory shared with the device process.

    Args:
      mesh: connected to all other hosts.
      device: the end of the memory that is shared with the device process.
      neighbours: hosts that share memory with this one.
      wire_dtype: one of `workers.job.job.WIRE_DTYPES`.
      timeout_s: longest wait for the others or for the device.
      check: called while this host waits for its device; raises to end the wait.
    """

    def __init__(
        self,
        lookups: HostLookups,
        *,
        mesh: Mesh,
        device: HandoverEnd,
        neighbours: AbstractSet[int],
        wire_dtype: str,
        timeout_s: float,
        tracker: Tracker,
        check: Callable[[], None],
    ) -> None:
        self._lookups, self._sharded, self._pooled = lookups, lookups.sharded, lookups.pooled
        self._device, self._tracker, self._check, self._timeout_s = device, tracker, check, timeout_s
        self._ids = IdExchange(mesh, timeout_s=timeout_s)
        self._vectors = VectorExchange(
            mesh,
            lookups.sharded,
            lookups.pooled,
            lookups.layout,
            neighbours=neighbours,
            wire_dtype=wire_dtype,
            timeout_s=timeout_s,
        )
        self._found_early = Early.ROWS | Early.POOLED
        self._rows_asked = np.zeros(len(lookups.specs), np.int64)

    def take_rows_asked(self) -> tuple[int, ...]:
        """Per table, rows that all hosts asked of this one since the last call."""
        taken = tuple(int(rows) for rows in self._rows_asked)
        self._rows_asked[:] = 0
        return taken

    def take_altered_ids(self) -> tuple[int, ...]:
        """Per table, ids outside its vocabulary that were dropped, clipped or hashed since the last call."""
        return self._lookups.bags.take_altered()

    def prepare(self, reader: ReadAhead, number: int, *, buffer: int | None = None) -> Step:
        """Reads a batch, finds the rows of its ids, and tells the owners which are wanted. Steps of training take the
        buffers in turn.
        """
        buffer = number % self._lookups.num_buffers if buffer is None else buffer
        with self._tracker.phase(Phase.READ):
            batch = reader.get(number)
        with self._tracker.phase(Phase.DEDUP):
            bags = self._lookups.bags.of(batch.features)
            prepared = self._sharded.prepare(bags)
            request = self._pooled.request(bags, buffer=buffer)
        weight = float(batch.weights.sum(dtype=np.float64))
        with self._tracker.phase(Phase.ID_EXCHANGE):
            asked = self._ids.exchange(number, prepared, request, weight=weight, found_early=self._found_early)
            self._sharded.accept(prepared, asked.wanted, asked.wanted_counts)
            self._rows_asked += self._sharded.rows_by_table(asked.wanted_counts)
        with self._tracker.phase(Phase.GROUP):
            self._pooled.accept(request, asked.frames, self._device.buffers[buffer]["gradients"])
        return Step(
            number=number,
            buffer=buffer,
            batch=batch,
            prepared=prepared,
            request=request,
            weight_sum=asked.weight_sum,
            tries_early=asked.found_early,
        )

    def forward_early(self, step: Step, previous: Step) -> None:
        """The part of `forward` that no gradient of `previous`, the step that the device works on, will change."""
        found = Early.NONE
        if Early.ROWS in step.tries_early and self._sharded.groups:
            with self._tracker.phase(Phase.SPLIT):
                self._sharded.split(step.prepared, previous.prepared)
            with self._tracker.phase(Phase.EARLY_GATHER):
                self._sharded.gather(step.prepared, Part.EARLY)
            with self._tracker.phase(Phase.EARLY_EXCHANGE):
                step.early_rows = self._vectors.early_rows(step.prepared, step.number)
            found |= Early.ROWS if any(step.prepared.splits) else Early.NONE
        if Early.POOLED in step.tries_early and self._pooled.is_used:
            activations = self._device.buffers[step.buffer]["activations"]
            with self._tracker.phase(Phase.SPLIT):
                self._pooled.split(step.request, previous.request)
            with self._tracker.phase(Phase.EARLY_POOL):
                self._pooled.pool_for_others(step.request, Part.EARLY)
                self._vectors.begin_early_pooled(step.request, step.number, activations)
                self._pooled.pool_own(step.request, activations, Part.EARLY)
            with self._tracker.phase(Phase.EARLY_EXCHANGE):
                step.early_pooled = self._vectors.finish_early_pooled(activations)
            found |= Early.POOLED if any(step.request.splits) else Early.NONE
        self._found_early = found

    def forward(self, step: Step) -> None:
        """Activations into the shared memory, from rows that come here and from vectors pooled at their owners; what
        went early is done.
        """
        arrays = self._device.buffers[step.buffer]
        activations = arrays["activations"]
        with self._tracker.phase(Phase.GATHER):
            self._sharded.gather(step.prepared)
        with self._tracker.phase(Phase.ROW_EXCHANGE):
            self._vectors.rows(step.prepared, step.number, step.early_rows)
        with self._tracker.phase(Phase.POOL_FOR_OTHERS):
            self._pooled.pool_for_others(step.request)
        self._vectors.begin_pooled(step.request, step.number, activations, step.early_pooled)
        # The own part is combined while the others' vectors travel.
        with self._tracker.phase(Phase.POOL):
            self._pooled.pool_own(step.request, activations)
            self._pool_rows(step, arrays)
        with self._tracker.phase(Phase.ACTIVATION_EXCHANGE):
            self._vectors.finish_pooled()

    def _pool_rows(self, step: Step, arrays: Mapping[str, np.ndarray]) -> None:
        """What needs no other host any more: features whose rows came here, and the inputs of the dense half."""
        n = step.batch.num_samples
        blocks = self._lookups.blocks(arrays["activations"])
        self._sharded.pool(step.prepared, blocks)
        for feature in self._sharded.features:
            blocks[feature.name][step.prepared.features[feature.name].num_samples :] = 0.0
        for name in ("dense", "labels", "weights"):
            arrays[name][:n] = getattr(step.batch, name)
            arrays[name][n:] = 0.0

    def announce(self, step: Step, kind: RecordKind) -> None:
        """Tells the device that its input is complete."""
        self._device.send(Record(kind=kind, step=step.number, buffer=step.buffer, weight_sum=step.weight_sum))

    def end_window(self, step: int) -> None:
        """Tells the device that nothing more comes in this window."""
        self._device.send(Record(kind=RecordKind.END, step=step))

    def await_device(self, step: Step) -> Mapping[str, np.ndarray]:
        """Waits until the device has answered `step`. Returns the arrays of its buffer.

        Raises:
          HandoverError: the device process is gone or silent.
        """
        with self._tracker.phase(Phase.DEVICE):
            answer = self._device.receive(timeout_s=self._timeout_s, keep_waiting=self._check)
        if answer.kind is not RecordKind.DONE or answer.step != step.number:
            raise RuntimeError(
                f"The device process answered {answer.kind.name} for step {answer.step}. Expected DONE for step "
                f"{step.number}."
            )
        return self._device.buffers[step.buffer]

    def backward(self, step: Step) -> None:
        """Gradients of this host's samples to the owners of the rows, then one update of each touched row."""
        gradients = self._device.buffers[step.buffer]["gradients"]
        rates = learning_rates(self._lookups.specs, step.number)
        self._vectors.begin_pooled_gradients(step.number, gradients)
        with self._tracker.phase(Phase.GRADIENT_SUM):
            self._sharded.sum_gradients(step.prepared, self._lookups.blocks(gradients))
        with self._tracker.phase(Phase.GRADIENT_EXCHANGE):
            self._vectors.finish_pooled()
            self._vectors.row_gradients(step.prepared, step.number)
        with self._tracker.phase(Phase.UPDATE):
            self._sharded.update(step.prepared, rates)
            self._pooled.update(step.request, gradients, rates)
