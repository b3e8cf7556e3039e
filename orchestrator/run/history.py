"""`History`: what one call of the driver has trained and seen, cut back whenever a generation is lost; and the rate
that follows from it.

Pure bookkeeping: the driver says what happened and reads the clock, and nothing here waits or writes.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from podembed.orchestrator.api.result import Evaluation, Recovery
from podembed.workers.liveness.progress import Phase

PACE_WINDOWS = 20
"""Windows by which the time that is left is guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps that were trained in one go.

    Attributes:
      generation: generation of the driver that trained them.
      first_step, step: steps done before it and after it.
      loss: mean over its steps.
      num_samples: without padding.
      seconds: wall time.
    """

    generation: int
    first_step: int
    step: int
    loss: float
    num_samples: int
    seconds: float

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0


def median_samples_per_s(windows: Sequence[Window]) -> float:
    """Half of the steps went at least so fast; 0.0 without a window.

    The first window of each generation is left out, unless there are no others: caches are cold there, and programs are
    compiled. Windows differ in length, so each counts with its steps. This one figure is what the summary, the report
    and the live view have.

    Args:
      windows: windows whose steps count, in their order.
    """
    firsts = [at == 0 or windows[at - 1].generation != window.generation for at, window in enumerate(windows)]
    warm = [window for window, is_first in zip(windows, firsts, strict=True) if not is_first] or windows
    half, passed = sum(window.step - window.first_step for window in warm) / 2, 0
    for window in sorted(warm, key=lambda window: window.samples_per_s):
        passed += window.step - window.first_step
        if passed >= half:
            return window.samples_per_s
    return 0.0


@dataclass(slots=True)
class History:
    """The history that this call of the driver has seen. Mutated as the run goes on; cut back to the base when a
    generation is lost.

    Attributes:
      losses: of each step.
      windows: in the order of their steps, without those that were lost.
      phase_s, phase_cpu_s: seconds of each phase on host 0, and processor seconds of its working thread, over all
        windows.
    """

    losses: dict[int, float] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    phase_s: dict[str, float] = field(default_factory=dict)
    phase_cpu_s: dict[str, float] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    failed_saves: int = 0
    _began_s: float | None = None
    _ended_s: float = 0.0
    _evaluated_s: float = 0.0
    _evaluated_before_end_s: float = 0.0
    # Also those that were lost.
    _num_steps: int = 0
    _generation: int = -1
    _pace_generation: int = -1
    # Steps and seconds of the last windows of that generation, without its first one.
    _pace: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PACE_WINDOWS))

    def window(
        self,
        *,
        generation: int,
        first_step: int,
        losses: Sequence[float],
        num_samples: int,
        phase_s: Mapping[Phase, float],
        phase_cpu_s: Mapping[Phase, float],
        began_s: float,
        ended_s: float,
    ) -> Window:
        """A window was trained.

        Args:
          losses: of its steps.
          began_s, ended_s: the clock's readings.
        """
        if self._began_s is None:
            self._began_s = began_s
        if generation == self._generation:
            # With what came in between, but for evaluations.
            spent_s = ended_s - self._ended_s - (self._evaluated_s - self._evaluated_before_end_s)
            self._take_pace(generation, len(losses), spent_s)
        self._generation = generation
        self._ended_s, self._evaluated_before_end_s = ended_s, self._evaluated_s
        self._num_steps += len(losses)
        done = Window(
            generation=generation,
            first_step=first_step,
            step=first_step + len(losses),
            loss=statistics.fmean(losses),
            num_samples=num_samples,
            seconds=ended_s - began_s,
        )
        self.windows.append(done)
        self.losses.update(enumerate(losses, first_step))
        for sums, window in ((self.phase_s, phase_s), (self.phase_cpu_s, phase_cpu_s)):
            for phase, spent_s in window.items():
                sums[phase.value] = sums.get(phase.value, 0.0) + spent_s
        return done

    def evaluation(self, evaluation: Evaluation, *, seconds: float) -> None:
        """An evaluation was made; it took so long. It takes the place of one of the same step: whoever starts again
        from a commit that owes its evaluation makes it again.
        """
        self.evaluations = [made for made in self.evaluations if made.step != evaluation.step] + [evaluation]
        if self._began_s is not None:
            self._evaluated_s += seconds

    def cut(self, step: int) -> None:
        """Forgets what was done after `step` steps; the time that it took was spent all the same."""
        self.losses = {at: loss for at, loss in self.losses.items() if at < step}
        self.windows = [window for window in self.windows if window.step <= step]
        self.evaluations = [evaluation for evaluation in self.evaluations if evaluation.step <= step]

    @property
    def num_samples(self) -> int:
        """Samples that were trained and not lost, each counted once an epoch."""
        return sum(window.num_samples for window in self.windows)

    @property
    def trained_s(self) -> float:
        """Seconds from the beginning of the first window to the end of the last one, but for evaluations.

        Everything else in between counts: recoveries, changes of hosts, steps that were lost, waiting for commits.
        """
        return 0.0 if self._began_s is None else self._ended_s - self._began_s - self._evaluated_before_end_s

    def left_s(self, num_steps: int) -> float | None:
        """Seconds for so many steps more, at the pace of the last windows of one generation and what came in between,
        and with as much of evaluations a step as so far. None before there are two windows.

        What a fault cost is no pace, and the first window of a generation has cold caches.
        """
        if not self._pace:
            return None
        pace_s = sum(spent_s for _, spent_s in self._pace) / sum(steps for steps, _ in self._pace)
        return (pace_s + self._evaluated_s / self._num_steps) * num_steps

    def _take_pace(self, generation: int, num_steps: int, spent_s: float) -> None:
        if generation != self._pace_generation:
            self._pace_generation = generation
            self._pace.clear()
        self._pace.append((num_steps, spent_s))

    @property
    def median_samples_per_s(self) -> float:
        """See the function of this name."""
        return median_samples_per_s(self.windows)
