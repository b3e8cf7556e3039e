"""`Timeline`: one step as parts of hosts and devices, and what they take where they share processors.

Kernels and messages are known as they are alone. Runs of made-up jobs showed how many processor seconds they take in a
run (`PodCorrections`), and how long hosts wait for each other. `sharing.follow` makes steps of these. Names of phases
are those that a run prints, and the phases are those of host 0, as there.

Of a pod of many machines that of host 0 is followed, and the busiest host beside it. All others wait for that one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from podembed.orchestrator.prediction.demand import DenseHalf, Setting
from podembed.orchestrator.prediction.parts import POOLED, Alone, HostSeconds, Wire
from podembed.orchestrator.prediction.sharing import Followed, HostParts, Part, follow
from podembed.workers.calibration.record import Calibration, Correction, PodCorrections, Waiting
from podembed.workers.liveness.progress import Phase
from podembed.workers.liveness.step_parts import parts_of_step

THREADED = frozenset(
    (Phase.GROUP, Phase.PREFETCH_POOL, Phase.POOL_FOR_OTHERS, Phase.POOL, Phase.GRADIENT_SUM, Phase.UPDATE)
)
"""Phases whose kernels use all threads of a host."""

_FAMILIES = {Phase.POOL_FOR_OTHERS: Phase.POOL, Phase.PREFETCH_GATHER: Phase.GATHER}
_FLOAT_BYTES = 4
_REST_OF_POOL = "rest of pool"
"""Pooling what was not pooled ahead of the update."""
_POOL_OF_ROWS = "pool of rows"
"""Pooling rows that came and adding up partial sums: a phase of pooling, but other code."""


PLAIN = PodCorrections(hosts=1, phases={}, device=Correction(), waiting=Waiting(), reading=1.0)
"""Where no runs were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """One step of a run.

    Attributes:
      phase_s: on host 0, in the order of a step.
      phase_cpu_s: processor seconds of its working thread in each.
      step_s: of all; the same on every host.
      device_s: what the device works, also where its host does not wait for it.
      cpu_s: processor seconds of the hosts and their devices, in the mean.
      sent_bytes: by a host, in the mean.
    """

    setting: Setting
    phase_s: Mapping[Phase, float]
    phase_cpu_s: Mapping[Phase, float]
    step_s: float
    device_s: float
    cpu_s: float
    sent_bytes: float

    @property
    def parts_s(self) -> Mapping[str, float]:
        """Of a step on host 0, as `parts_of_step`."""
        return parts_of_step(_texts(self.phase_s), _texts(self.phase_cpu_s), self.step_s)

    @property
    def samples_per_s(self) -> float:
        return self.setting.batch_size / self.step_s if self.step_s else 0.0


def _texts(phases: Mapping[Phase, float]) -> dict[str, float]:
    return {str(phase): seconds for phase, seconds in phases.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A phase of a step, or a part of one, on all hosts.

    Attributes:
      alone: what its kernels take alone.
      wire_s: what its messages take, on each host.
      share: of the phase's constant that falls to this piece.
      kind: where it does something else than a phase of that name does otherwise.
      is_after: whether the device is done by then.
    """

    phase: Phase
    alone: Alone
    wire_s: float = 0.0
    share: float = 1.0
    kind: str | None = None
    posts: str | None = None
    awaits: str | None = None
    is_after: bool = False

    @property
    def family(self) -> str:
        """Under which name its processor seconds are corrected: several that do the same have one."""
        return self.kind or str(_FAMILIES.get(self.phase, self.phase))


class Timeline:
    """A step of so many hosts. Made once.

    Attributes:
      cold: what the caches lose between two steps, by what a host and its device touch in one.
      pieces: what it consists of, in their order.
    """

    def __init__(
        self, seconds: HostSeconds, wire: Wire, setting: Setting, calibration: Calibration, dense: DenseHalf
    ) -> None:
        self._seconds, self._wire, self._setting, self._calibration = seconds, wire, setting, calibration
        self._dense, self._nothing = dense, Alone.nothing(setting.num_hosts)
        self._fix = calibration.corrections_for(setting.share_a_machine) or PLAIN
        self.cold = self._cold()
        # Then each host is followed as if it had a machine with one processor.
        self._keeps = setting.keeps_to_processors(calibration.machine.cpus)
        self.pieces: list[Piece] = []
        self._beside()
        if not setting.staleness:
            self._after()
            self._forward(rest=True, is_after=True)
        else:
            self._forward(rest=False, is_after=False)
            self._after()

    # ------------------------------------------------------------------ what a step consists of

    def _beside(self) -> None:
        """What a host does while its device works."""
        of, wire, seconds = self._seconds.of, self._wire, self._seconds
        found = of("dedup/pooled", "dedup/partial", "dedup/rows")
        # Between the phases something is done for each feature, too.
        floats = seconds.of(POOLED).floats
        self.pieces.append(Piece(Phase.BETWEEN, Alone(0 * found.seconds, found.calls, floats)))
        self.pieces.append(Piece(Phase.READ, self._nothing))
        self._work(Phase.DEDUP, found)
        own = of("id exchange/pooled", "id exchange/rows")
        self._exchange(Phase.ID_EXCHANGE, wire.id_bytes, name="ids", own=own)
        if seconds.of("group/pooled").seconds.any():
            self._work(Phase.GROUP, of("group/pooled"))
        if self._setting.staleness:
            return
        if seconds.prefetches_rows:
            self._work(Phase.SPLIT, of("split/rows"))
            self._work(Phase.PREFETCH_GATHER, of("gather/rows").part(seconds.early_share("gather/rows")))
            early = wire.split(wire.row_bytes, of_rows=True, is_early=True)
            self._exchange(Phase.PREFETCH_EXCHANGE, early, name="early rows")
        if seconds.prefetches_pooled:
            self._work(Phase.SPLIT, of("split/pooled"))
            self._work(Phase.PREFETCH_POOL, of(POOLED).part(seconds.early_share(POOLED)))
            early = wire.split(wire.vector_bytes, of_rows=False, is_early=True)
            self._exchange(Phase.PREFETCH_EXCHANGE, early, name="early vectors")

    def _after(self) -> None:
        of, wire = self._seconds.of, self._wire
        self._work(Phase.GRADIENT_SUM, of("gradient sum/rows"), is_after=True)
        num_bytes = wire.vector_bytes + wire.row_bytes
        self._exchange(Phase.GRADIENT_EXCHANGE, num_bytes, name="gradients", own=self._calls(), is_after=True)
        self._work(Phase.UPDATE, of("update/pooled", "update/rows"), is_after=True)

    def _forward(self, *, rest: bool, is_after: bool) -> None:
        """From the rows to the activations; `rest` leaves out what was prefetched."""
        seconds, wire, num_hosts = self._seconds, self._wire, self._setting.num_hosts
        # On one machine nothing is sent, and a host's own bags go along.
        others = 1.0 if 1 < num_hosts == self._setting.share_a_machine else 1 - 1 / num_hosts
        rows, pooled = seconds.of("gather/rows"), seconds.of(POOLED)
        row_bytes, vector_bytes = wire.row_bytes, wire.vector_bytes
        if rest:
            rows = rows.part(1 - seconds.early_share("gather/rows"))
            pooled = pooled.part(1 - seconds.early_share(POOLED))
        if rest and seconds.prefetches_rows:
            row_bytes = wire.split(row_bytes, of_rows=True, is_early=False)
        if rest and seconds.prefetches_pooled:
            vector_bytes = wire.split(vector_bytes, of_rows=False, is_early=False)
        kind = _REST_OF_POOL if rest and seconds.prefetches_pooled else None
        self._work(Phase.GATHER, rows, is_after=is_after)
        if others:
            self._work(Phase.POOL_FOR_OTHERS, pooled * others, is_after=is_after, kind=kind)
        # Vectors are on their way while a host pools its own.
        self._exchange(Phase.ACTIVATION_EXCHANGE, 0.0, name="vectors", is_after=is_after, awaits=False)
        if others < 1:
            self._work(Phase.POOL, pooled * (1 - others), is_after=is_after, kind=kind)
        num_bytes = row_bytes + vector_bytes
        self._exchange(
            Phase.ACTIVATION_EXCHANGE, num_bytes, name="vectors", own=self._calls(), is_after=is_after, posts=False
        )
        if (more := seconds.of("pool/rows", "sums/partial")).seconds.any():
            self._work(Phase.POOL, more, is_after=is_after, kind=_POOL_OF_ROWS)

    def _calls(self) -> Alone:
        """Something is done for each feature that is pooled, and takes no time in a kernel. What was in the caches is
        gone the more, the more another process wrote.
        """
        pooled = self._seconds.of(POOLED)
        return Alone(0 * pooled.seconds, pooled.calls, pooled.floats)

    def _work(self, phase: Phase, alone: Alone, *, is_after: bool = False, kind: str | None = None) -> None:
        if alone.seconds.any():
            self.pieces.append(Piece(phase, alone, share=self._share_of(phase), is_after=is_after, kind=kind))

    def _exchange(
        self,
        phase: Phase,
        num_bytes: float,
        *,
        name: str,
        own: Alone | None = None,
        is_after: bool = False,
        posts: bool = True,
        awaits: bool = True,
    ) -> None:
        """A host sends, and goes on when all hosts have sent. Then it does its `own` part."""
        own = own or self._nothing
        if self._setting.num_hosts == 1:
            if posts and awaits:
                self.pieces.append(Piece(phase, own, share=self._share_of(phase), is_after=is_after))
            return
        wire_s = self._wire.exchange(num_bytes)
        # Half of the constant falls to either end of an exchange.
        share = 0.5 * self._share_of(phase) if posts else 0.5
        if posts:
            self.pieces.append(Piece(phase, self._nothing, wire_s / 2, share, posts=name, is_after=is_after))
        if awaits:
            self.pieces.append(Piece(phase, own, wire_s / 2, share, awaits=name, is_after=is_after))

    def _share_of(self, phase: Phase) -> float:
        """Of the constant of a phase: it counts once a step."""
        return 0.0 if any(piece.phase is phase for piece in self.pieces) else 1.0

    # ------------------------------------------------------------------ what it takes

    @property
    def device_alone_s(self) -> float:
        """Processor seconds of a device's step alone, and of the sum over all devices."""
        dense = self._dense
        return dense.seconds(self._setting.host_samples) + self._wire.all_reduce_s(dense.gradient_bytes)

    def cpu_s(self, piece: Piece) -> np.ndarray:
        """Processor seconds of a piece on every host in a run."""
        fix = self._fix.phases.get(piece.family, Correction())
        alone = piece.alone
        variable = fix.factor * (alone.seconds + piece.wire_s) + fix.call_s * alone.calls + fix.float_s * alone.floats
        return variable + piece.share * fix.once_s(self.cold)

    def step(self) -> PredictedStep:
        setting = self._setting
        cpus = self._calibration.machine.cpus
        cpu_s = [self.cpu_s(piece) for piece in self.pieces]
        chosen, processors = self._looked_at(np.sum(cpu_s, axis=0), cpus)
        hosts = [self.host_parts(host, [float(spent[host]) for spent in cpu_s]) for host in chosen]
        found = self.followed(hosts, processors)
        device_cpu_s = self.device_cpu_s
        return PredictedStep(
            setting=setting,
            phase_s={phase: spent for phase, spent in found.phase_s[0].items() if spent > 0},
            phase_cpu_s=hosts[0].phase_cpu_s,
            step_s=found.step_s,
            device_s=found.device_s[0],
            cpu_s=float(np.mean(np.sum(cpu_s, axis=0))) + device_cpu_s + self._reading_s(),
            sent_bytes=self._wire.sent_bytes,
        )

    def followed(self, hosts: list[HostParts], processors: dict[int, float] | None = None) -> Followed:
        return follow(hosts, cpus=1 if self._keeps else self._calibration.machine.cpus, processors=processors)

    def _looked_at(self, cpu_s: np.ndarray, cpus: int) -> tuple[list[int], dict[int, float]]:
        """The hosts to be followed: those of the first machine, and the busiest one with its share of its own."""
        together = self._setting.share_a_machine
        chosen = list(range(min(together, len(cpu_s))))
        busiest = int(np.argmax(cpu_s))
        if busiest in chosen:
            return chosen, {}
        return [*chosen, busiest], {busiest // together: cpus / together}

    def host_parts(self, host: int, cpu_s: list[float], *, waiting: Waiting | None = None) -> HostParts:
        """A host with its device.

        Args:
          cpu_s: by piece, its processor seconds.
          waiting: None takes that of the corrections.
        """
        setting, waiting = self._setting, waiting or self._fix.waiting
        is_crowded = 2 * setting.share_a_machine > self._calibration.machine.cpus
        parts: dict[bool, list[Part]] = {False: [], True: []}
        since_s = 0.0
        for piece, spent in zip(self.pieces, cpu_s, strict=True):
            delay_s = turn_s = 0.0
            is_woken = piece.phase is Phase.BETWEEN or piece.awaits is not None
            if is_crowded and is_woken and not piece.is_after:
                turn_s = waiting.turn * self.device_cpu_s
            if piece.awaits is not None:
                delay_s = waiting.meeting_s + waiting.spread * since_s
                since_s = 0.0
            elif piece.phase is Phase.READ:
                delay_s = waiting.input_s
            since_s += spent
            first, *more = self._threaded(piece, spent)
            parts[piece.is_after] += [replace(first, delay_s=delay_s, turn_s=turn_s), *more]
        return HostParts(
            machine=host if self._keeps else host // setting.share_a_machine,
            beside=tuple(parts[False]),
            after=tuple(parts[True]),
            is_ahead=bool(setting.staleness),
            device_cpu_s=self.device_cpu_s,
            device_threads=self._dense.threads,
            device_delay_s=waiting.device_s,
            device_weight=waiting.device_weight,
            reading_s=self._fix.reading * self._reading_s(),
        )

    def _threaded(self, piece: Piece, cpu_s: float) -> list[Part]:
        """A piece as parts: what Python does is done by one thread, kernels by all."""
        if self._setting.threads == 1 or piece.phase not in THREADED:
            return [Part(phase=piece.phase, cpu_s=cpu_s, posts=piece.posts, awaits=piece.awaits)]
        fix = self._fix.phases.get(piece.family, Correction())
        alone_s = min(cpu_s, piece.share * fix.once_s(self.cold) + fix.call_s * float(np.mean(piece.alone.calls)))
        threads = float(self._setting.threads)
        return [Part(phase=piece.phase, cpu_s=alone_s), Part(phase=piece.phase, cpu_s=cpu_s - alone_s, threads=threads)]

    @property
    def device_calls(self) -> float:
        """Features, each of which a device gets as an array of its own."""
        return float(self._seconds.num_features)

    @property
    def device_floats(self) -> float:
        """Activations that a device gets from its host."""
        return self._setting.host_samples * self._seconds.width

    @property
    def device_cpu_s(self) -> float:
        """Processor seconds of a device's step in a run."""
        return self._fix.device.seconds(
            self.device_alone_s, cold=self.cold, calls=self.device_calls, floats=self.device_floats
        )

    def _cold(self) -> float:
        vectors = 2 * _FLOAT_BYTES * self.device_floats
        step_bytes = self._seconds.touched.step_bytes + vectors + self._dense.gradient_bytes
        return self._calibration.kernels_for(self._setting.share_a_machine).caches.cold_share(step_bytes)

    def _reading_s(self) -> float:
        """Processor seconds of the thread that decodes input for one step, alone."""
        setting = self._setting
        if not setting.reads_files:
            return 0.0
        if setting.read_sample_s is not None:
            return setting.read_sample_s * setting.host_samples
        return self._calibration.sample_s * setting.host_samples + self._calibration.id_s * self._wire.ids
