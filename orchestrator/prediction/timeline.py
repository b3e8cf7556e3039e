"""`Timeline`: one step, followed host by host, from exchange to exchange.

At each exchange all hosts wait for the slowest. While a device works, its host goes on with the next step. If a machine
has fewer processors than processes that work, both take longer. A thread that decodes input works beside both. Names
of phases are those that a run prints, and the phases are those of host 0, as there.

What a phase takes by itself is corrected by what runs of made-up jobs showed (`PodCorrections`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from podembed.orchestrator.prediction.demand import DenseHalf, Setting
from podembed.orchestrator.prediction.parts import POOLED, HostSeconds, Wire
from podembed.workers.calibration.record import Calibration
from podembed.workers.liveness.progress import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """One step of a run.

    Attributes:
      phase_s: on host 0, in the order of a step.
      step_s: of all; the same on every host.
      device_s: what the device works, also where its host does not wait for it.
      sent_bytes: by a host, in the mean.
    """

    setting: Setting
    phase_s: Mapping[Phase, float]
    step_s: float
    device_s: float
    sent_bytes: float

    @property
    def samples_per_s(self) -> float:
        return self.setting.batch_size / self.step_s if self.step_s else 0.0


class Timeline:
    """The hosts of one step. Mutated while it is followed: clocks `[num_hosts]` and phases.

    Attributes:
      alone: by phase, seconds on each host without corrections, without other processes and without waiting.
      before: by exchange, what hosts had done since the exchange before it, in the same seconds.
      device_alone_s: the same of a device, with the sum over all devices.
    """

    def __init__(
        self, seconds: HostSeconds, wire: Wire, setting: Setting, calibration: Calibration, dense: DenseHalf
    ) -> None:
        self._seconds, self._wire, self._setting, self._calibration = seconds, wire, setting, calibration
        self._clock = np.zeros(setting.num_hosts)
        self._phases: dict[Phase, np.ndarray] = {}
        self._charged: set[Phase] = set()
        self.alone: dict[Phase, np.ndarray] = {}
        self.before: dict[Phase, float] = {}
        self._since_s = 0.0
        self.device_alone_s = dense.seconds(setting.host_samples) + wire.all_reduce(dense.gradient_bytes)
        self._fix = calibration.corrections_for(setting.share_a_machine)
        self._always, self._beside = crowding(setting.share_a_machine, calibration.machine.cpus)

    def step(self) -> PredictedStep:
        # The clock starts as devices do, with the input of step t. The overlapped part is looked at without its stretch
        # first, since that depends on its length.
        self._overlapped(1.0)
        host_s = float(self._clock.max())
        device_s = self.device_alone_s if self._fix is None else self._fix.device.seconds(self.device_alone_s)
        shared_s = min(host_s, device_s * self._always)
        self._overlapped(1 + self._beside * shared_s / host_s if host_s else 1.0)
        device_s = device_s * self._always + self._beside * shared_s
        waited = np.maximum(self._clock, device_s)
        self._note(Phase.DEVICE, waited - self._clock)
        self._since_s += self.device_alone_s
        self._clock = waited
        self._after_device()
        if not self._setting.staleness:
            self._forward(rest=True)
        return self._with_reading(device_s)

    def _with_reading(self, device_s: float) -> PredictedStep:
        """A thread of each host decodes the input of later steps meanwhile."""
        reading_s, step_s = self._reading_s(), float(self._clock.max())
        is_full = self._setting.share_a_machine >= self._calibration.machine.cpus
        costs = self._fix.reading if self._fix is not None else float(is_full)
        slower = 1 + costs * reading_s / step_s if step_s else 1.0
        phase_s = {phase: float(slower * spent[0]) for phase, spent in self._phases.items() if spent[0] > 0}
        wait_s = max(0.0, reading_s - slower * step_s)
        if wait_s:
            phase_s[Phase.READ] = phase_s.get(Phase.READ, 0.0) + wait_s
        return PredictedStep(
            setting=self._setting,
            phase_s=phase_s,
            step_s=slower * step_s + wait_s,
            device_s=device_s * slower,
            sent_bytes=self._wire.sent_bytes,
        )

    def _reading_s(self) -> float:
        """Of the thread that decodes input for one step."""
        setting = self._setting
        if not setting.reads_files:
            return 0.0
        if setting.read_sample_s is not None:
            return setting.read_sample_s * setting.host_samples
        return self._calibration.sample_s * setting.host_samples + self._calibration.id_s * self._wire.ids

    def _overlapped(self, stretch: float) -> None:
        """What a host does while its device works."""
        self._clock[:], self._phases, self.alone, self.before, self._since_s = 0.0, {}, {}, {}, 0.0
        self._charged.clear()
        of, wire = self._seconds.of, self._wire
        nothing = np.zeros(self._setting.num_hosts)
        if self._fix is not None:
            self._advance(Phase.BETWEEN, nothing + self._fix.between.seconds(self.device_alone_s), stretch)
            self._advance(Phase.READ, self._fixed(Phase.READ, nothing), stretch)
        self._work(Phase.DEDUP, of("dedup/pooled", "dedup/partial", "dedup/rows"), stretch)
        self._exchange(Phase.ID_EXCHANGE, wire.id_bytes, own=of("id exchange/pooled", "id exchange/rows"), by=stretch)
        self._work(Phase.GROUP, of("group/pooled"), stretch)
        if self._setting.staleness:
            self._forward(rest=False, stretch=stretch)
            return
        if self._seconds.prefetches_rows:
            self._work(Phase.SPLIT, of("split/rows"), stretch)
            self._work(Phase.PREFETCH_GATHER, self._seconds.early("gather/rows"), stretch)
            self._exchange(Phase.PREFETCH_EXCHANGE, wire.split(wire.row_bytes, of_rows=True, is_early=True), by=stretch)
        if self._seconds.prefetches_pooled:
            self._work(Phase.SPLIT, of("split/pooled"), stretch)
            self._work(Phase.PREFETCH_POOL, self._seconds.early(POOLED), stretch)
            early = wire.split(wire.vector_bytes, of_rows=False, is_early=True)
            self._exchange(Phase.PREFETCH_EXCHANGE, early, by=stretch)

    def _after_device(self) -> None:
        of, wire = self._seconds.of, self._wire
        self._work(Phase.GRADIENT_SUM, of("gradient sum/rows"), 1.0)
        self._exchange(Phase.GRADIENT_EXCHANGE, wire.vector_bytes + wire.row_bytes)
        self._work(Phase.UPDATE, of("update/pooled", "update/rows"), 1.0)

    def _forward(self, *, rest: bool, stretch: float = 1.0) -> None:
        """From the rows to the activations; `rest` leaves out what was prefetched."""
        seconds, wire, others = self._seconds, self._wire, 1 - 1 / self._setting.num_hosts
        early_rows = seconds.early("gather/rows") if rest else 0.0
        early_pooled = seconds.early(POOLED) if rest else 0.0
        self._work(Phase.GATHER, seconds.of("gather/rows") - early_rows, stretch)
        row_bytes, vector_bytes = wire.row_bytes, wire.vector_bytes
        if rest and seconds.prefetches_rows:
            row_bytes = wire.split(row_bytes, of_rows=True, is_early=False)
        if rest and seconds.prefetches_pooled:
            vector_bytes = wire.split(vector_bytes, of_rows=False, is_early=False)
        pooled = seconds.of(POOLED) - early_pooled
        self._work(Phase.POOL_FOR_OTHERS, pooled * others, stretch)
        self._work(Phase.POOL, pooled * (1 - others), stretch)
        self._exchange(Phase.ACTIVATION_EXCHANGE, row_bytes + vector_bytes, by=stretch)
        self._work(Phase.POOL, seconds.of("pool/rows", "sums/partial"), stretch)

    def _work(self, phase: Phase, seconds: np.ndarray, stretch: float) -> None:
        if seconds.any():
            self._since_s += float(seconds.max())
            self._advance(phase, self._fixed(phase, seconds), stretch)

    def _exchange(self, phase: Phase, num_bytes: float, *, own: np.ndarray | float = 0.0, by: float = 1.0) -> None:
        """All hosts wait for the slowest; then each does its `own` part."""
        if self._setting.num_hosts > 1:
            waits = np.max(self._clock) - self._clock
            self._note(phase, waits)
            self._clock = self._clock + waits
        self.before[phase] = self.before.get(phase, 0.0) + self._since_s
        spent = np.zeros(self._setting.num_hosts) + self._wire.exchange(num_bytes) + own
        self._advance(phase, self._fixed(phase, spent, before_s=self._since_s), by)
        self._since_s = 0.0

    def _fixed(self, phase: Phase, seconds: np.ndarray, *, before_s: float = 0.0) -> np.ndarray:
        """Seconds as runs have them; what is constant of a phase counts once a step."""
        self.alone[phase] = self.alone.get(phase, 0.0) + seconds
        correction = self._fix.phases.get(str(phase)) if self._fix is not None else None
        if correction is None:
            return seconds
        constant_s = 0.0 if phase in self._charged else correction.constant_s
        self._charged.add(phase)
        return correction.factor * seconds + constant_s + correction.before * before_s

    def _advance(self, phase: Phase, seconds: np.ndarray, stretch: float) -> None:
        spent = seconds * self._always * stretch
        self._note(phase, spent)
        self._clock = self._clock + spent

    def _note(self, phase: Phase, seconds: np.ndarray) -> None:
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds


def crowding(hosts: int, cpus: int) -> tuple[float, float]:
    """How many times slower so many hosts on a machine are because others have its processors. And how much slower
    again while the devices work: 1 is twice as long.
    """
    always = max(1.0, hosts / cpus)
    return always, max(always, 2 * hosts / cpus) / always - 1
