"""`CpuTracker`: phase timers that also count processor seconds. Waiting takes none, nor does sharing a processor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from podembed.workers.liveness.progress import Phase, Tracker


class CpuTracker(Tracker):
    """A `Tracker` with processor seconds. Mutated: `phase_cpu_s`.

    Args:
      cpu_s: processor seconds of the process so far, all its threads together.

    Attributes:
      phase_cpu_s: processor seconds of each phase since `take_phase_cpu_s`; that of a phase within another one counts
        there alone.
    """

    def __init__(self, cpu_s: Callable[[], float] = time.process_time) -> None:
        super().__init__()
        self._cpu_s = cpu_s
        self._inner_cpu_s = 0.0
        self.phase_cpu_s: dict[Phase, float] = {}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """As `Tracker.phase`."""
        before_s, self._inner_cpu_s = self._inner_cpu_s, 0.0
        began_s = self._cpu_s()
        try:
            with super().phase(phase):
                yield
        finally:
            spent_s = self._cpu_s() - began_s
            self.phase_cpu_s[phase] = self.phase_cpu_s.get(phase, 0.0) + spent_s - self._inner_cpu_s
            self._inner_cpu_s = before_s + spent_s

    def take_phase_cpu_s(self) -> dict[Phase, float]:
        """The processor seconds since the last call, which start again at 0."""
        taken, self.phase_cpu_s = self.phase_cpu_s, {}
        return taken
