"""`Steps`: the parts of one step on one host: prepare, forward, wait for the device, backward.

All hosts call them in the same order, since each exchanges something with every other host. What runs before what, in a
window of steps, is `workers.host.windows`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from podembed.embedding.lookup.activation_layout import Blocks
from podembed.embedding.lookup.steps import LookupStep, LookupSteps
from podembed.embedding.vocabulary.dynamic_index import DynamicIndex
from podembed.embedding.vocabulary.policies import VocabularyCounts
from podembed.workers.data.batch import Batch
from podembed.workers.device.shared_memory import ChannelEnd, Record, RecordKind
from podembed.workers.host.exchange import MeshExchange
from podembed.workers.host.lookups import HostLookups, HostSequences, Lengths
from podembed.workers.host.prefetch_choice import PrefetchChoice
from podembed.workers.host.tables_on_devices import DeviceIds
from podembed.workers.input.read_ahead import ReadAhead
from podembed.workers.job.padding import LARGEST_LEVELS
from podembed.workers.job.tables import learning_rates
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.mesh.mesh import Mesh


@dataclass(slots=True, eq=False)
class Step:
    """A batch on its way through the step.

    Attributes:
      buffer: of the memory shared with the device process.
      lengths: of its sequences.
    """

    number: int
    buffer: int
    batch: Batch
    lookup: LookupStep
    lengths: Lengths

    @property
    def weight_sum(self) -> float:
        """Weight of the global batch."""
        return self.lookup.weight_sum


class Steps:
    """The steps of one host in one generation. Mutated: the tables, and the memory shared with the device process.

    Args:
      mesh: connected to all other hosts.
      device: the end of the memory that is shared with the device process.
      wire_dtype: one of `workers.job.job.WIRE_DTYPES`.
      timeout_s: longest wait for the others or for the device.
      sequences: as `JobConfig.sequences`.
      overlap: as `JobConfig.overlap`.
      schedule: as `JobConfig.schedule`.
      check: called while this host waits for its device; raises to end the wait.
      ids: of tables on devices.
      leaves_out_unlabelled: as `JobConfig.leaves_out_unlabelled`.
    """

    def __init__(
        self,
        lookups: HostLookups,
        *,
        mesh: Mesh,
        device: ChannelEnd,
        wire_dtype: str,
        timeout_s: float,
        tracker: Tracker,
        check: Callable[[], None],
        sequences: Mapping[str, int],
        overlap: bool | None = True,
        schedule: Callable[[int], float] | None = None,
        ids: DeviceIds,
        leaves_out_unlabelled: bool = False,
    ) -> None:
        self._lookups, self._ids = lookups, ids
        self._device, self._tracker, self._check, self._timeout_s = device, tracker, check, timeout_s
        self._schedule, self._leaves_out_unlabelled = schedule, leaves_out_unlabelled
        exchange = MeshExchange(mesh, lookups.both, wire_dtype=wire_dtype, timeout_s=timeout_s)
        self._steps = LookupSteps(lookups.both, exchange, phase=lambda phase: tracker.phase(Phase[phase.name]))
        features = [feature.name for feature in lookups.both.features]
        self._sequences = HostSequences(sequences, features, bags=lookups.bags, device=device)
        self._choice = PrefetchChoice(overlap)
        # Whether the next step was prefetched beside the one under way; None where nothing was prepared beside it.
        self._tried_prefetch: bool | None = None
        # When the device answered the step before, and whether it was prefetched beside that.
        self._answered: tuple[float, bool] | None = None
        layout = lookups.both.layout
        self._activations = [Blocks.of(layout, arrays["activations"]) for arrays in device.buffers]
        self._gradients = [Blocks.of(layout, arrays["gradients"]) for arrays in device.buffers]

    def take_rows_asked(self) -> tuple[int, ...]:
        """Per table, rows that all hosts asked of this one since the last call."""
        return self._steps.take_rows_asked()

    def take_vocabularies(self) -> dict[int, VocabularyCounts]:
        """By position of the table, what became of keys that come and go since the last call."""
        found = [(at, table.index) for at, table in enumerate(self._lookups.both.tables)]
        return {at: index.take_counts() for at, index in found if isinstance(index, DynamicIndex)}

    def take_altered_ids(self) -> tuple[int, ...]:
        """Per table, ids outside its vocabulary that were dropped, clipped or hashed since the last call."""
        return self._lookups.bags.take_altered()

    def prepare(
        self, reader: ReadAhead, number: int, *, buffer: int | None = None, counted: Collection[str] | None = None
    ) -> Step:
        """Reads a batch, finds the rows of its ids, and tells the owners which are wanted. Steps of training take the
        buffers in turn.

        Args:
          buffer: of an evaluation, which prefetches nothing.
          counted: as for `Bags.of`.
        """
        is_training = buffer is None
        buffer = number % self._lookups.num_buffers if buffer is None else buffer
        with self._tracker.phase(Phase.READ):
            batch = reader.get(number)
            if self._leaves_out_unlabelled:
                # Here, since the weight of the global batch, by which a step divides, is summed over the hosts.
                batch = batch.without_unlabelled()
        with self._tracker.phase(Phase.DEDUP):
            bags = self._lookups.bags.of(batch.features, counted=counted)
            lookup = self._steps.find(bags, buffer=buffer)
            lengths = self._sequences.lengths(batch)
            levels = self._ids.levels(bags, self._sequences.levels(lengths))
        self._steps.ask(
            lookup,
            number,
            weight=float(batch.weights.sum(dtype=np.float64)),
            gradients=self._gradients[buffer],
            wants_prefetch=is_training and self._choice.wants(number),
            levels=levels,
            training_step=number if is_training else None,
        )
        self._ids.agreed(lookup.levels)
        if lengths:
            self._steps.lay_out(lookup, self._sequences.laid_out(lookup.bags, lengths, lookup.levels))
        return Step(number, buffer, batch, lookup, lengths)

    def prefetch(self, step: Step, previous: Step) -> None:
        """The part of `forward` that no gradient of `previous`, the step that the device works on, will change."""
        before_s = self._tracker.phase_s.get(Phase.SPLIT, 0.0)
        self._steps.prefetch(step.lookup, previous.lookup, self._activations[step.buffer])
        self._tried_prefetch = bool(step.lookup.tries_prefetch)
        if self._tried_prefetch:
            self._choice.saw_split(self._tracker.phase_s.get(Phase.SPLIT, 0.0) - before_s)

    def forward(self, step: Step) -> None:
        """Activations and the inputs of the dense half into the shared memory."""
        activations = self._sequences.used(self._activations[step.buffer], step.lookup.bags)
        self._steps.forward(step.lookup, activations, meanwhile=lambda: self._copy_dense_inputs(step))

    def _copy_dense_inputs(self, step: Step) -> None:
        arrays, n = self._device.buffers[step.buffer], step.batch.num_samples
        for name in ("dense", "labels", "weights"):
            arrays[name][:n] = getattr(step.batch, name)
            arrays[name][n:] = 0.0
        for name, column in self._device.layout.columns_in(arrays).items():
            column[:n] = step.batch.columns[name]
            column[n:] = 0
        self._sequences.write(arrays, step.lengths)
        self._ids.write(step.buffer, step.lookup.bags, step.lookup.levels)

    def announce(self, step: Step, kind: RecordKind) -> None:
        """Tells the device that its input is complete."""
        if kind is RecordKind.TRAIN:
            self._ids.say_rates(step.buffer, self.rates(step))
        self._device.send(
            Record(
                kind=kind,
                step=step.number,
                buffer=step.buffer,
                weight_sum=step.weight_sum,
                levels=step.lookup.levels[: len(LARGEST_LEVELS)],
            )
        )

    def end_window(self, step: int) -> None:
        """Tells the device that nothing more comes in this window."""
        self._device.send(Record(kind=RecordKind.END, step=step))

    def await_device(self, step: Step) -> Mapping[str, np.ndarray]:
        """Waits until the device has answered `step`. Returns the arrays of its buffer.

        Raises:
          ChannelError: the device process is gone or silent.
        """
        before_s = self._tracker.phase_s.get(Phase.DEVICE, 0.0)
        with self._tracker.phase(Phase.DEVICE):
            answer = self._device.receive(timeout_s=self._timeout_s, keep_waiting=self._check)
        if self._tried_prefetch is False:
            self._choice.saw_wait(self._tracker.phase_s[Phase.DEVICE] - before_s)
        self._note_step(self._tried_prefetch)
        self._tried_prefetch = None
        if answer.kind is not RecordKind.DONE or answer.step != step.number:
            raise RuntimeError(
                f"The device process answered {answer.kind.name} for step {answer.step}. Expected DONE for step "
                f"{step.number}."
            )
        return self._device.buffers[step.buffer]

    def _note_step(self, is_prefetching: bool | None) -> None:
        """A step of a window ended, from the answer of the device to the one before on."""
        now_s, before = self._tracker.now_s, self._answered
        if before is not None and before[1] == is_prefetching:
            self._choice.saw_step(now_s - before[0], is_prefetching=before[1])
        self._answered = None if is_prefetching is None else (now_s, is_prefetching)

    def backward(self, step: Step) -> None:
        """Gradients of this host's samples to the owners of the rows, then one update of each touched row."""
        self._steps.backward(step.lookup, self._gradients[step.buffer], self.rates(step))

    def rates(self, step: Step) -> tuple[float, ...]:
        """Learning rates of all tables in a step; 0 where one is not trained."""
        return tuple(learning_rates(self._lookups.both.specs, step.number, self._schedule))
