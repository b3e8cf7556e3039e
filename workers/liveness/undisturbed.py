"""`UndisturbedTimer`: what those steps of a window took beside which a host saved nothing.

A prediction is of such steps. Where a run saves often, few of its windows are free of a save, but many steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from podembed.workers.liveness.progress import Phase, Spent, Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The steps of one window on one host, in sum.

    Attributes:
      num_steps: that began while no save was under way. `seconds` are of all of them.
      phase_s: of each phase in these steps.
      phase_cpu_s: processor seconds of the working thread in each, and between them.
      saving_steps, saving_s: of the others.
    """

    num_steps: int = 0
    seconds: float = 0.0
    phase_s: Mapping[Phase, float] = field(default_factory=dict)
    phase_cpu_s: Mapping[Phase, float] = field(default_factory=dict)
    saving_steps: int = 0
    saving_s: float = 0.0


class UndisturbedTimer:
    """The timer of one window. Mutated: the sums, and since when no save is under way.

    Args:
      is_saving: whether a save, or what else reads all rows, is under way.
    """

    def __init__(self, tracker: Tracker, *, is_saving: Callable[[], bool]) -> None:
        self._tracker, self._is_saving = tracker, is_saving
        self._num_steps, self._saving_steps, self._seconds = 0, 0, 0.0
        self._phase_s: dict[Phase, float] = {}
        self._phase_cpu_s: dict[Phase, float] = {}
        self._began_s = tracker.now_s
        self._since: Spent | None = None
        # What a window does before its first step belongs to it.
        self._look()

    def begin_step(self) -> None:
        """A step that begins while a save is under way does not count."""
        self._look()
        if self._since is not None:
            self._num_steps += 1
        else:
            self._saving_steps += 1

    def take(self) -> StepTimes:
        """At the end of the window, before the tracker's timers are taken."""
        self._pause()
        return StepTimes(
            num_steps=self._num_steps,
            seconds=self._seconds,
            phase_s=self._phase_s,
            phase_cpu_s=self._phase_cpu_s,
            saving_steps=self._saving_steps,
            saving_s=max(0.0, self._tracker.now_s - self._began_s - self._seconds),
        )

    def _look(self) -> None:
        if self._is_saving():
            self._pause()
        elif self._since is None:
            self._since = self._tracker.spent()

    def _pause(self) -> None:
        before, self._since = self._since, None
        if before is None:
            return
        now = self._tracker.spent()
        self._seconds += now.now_s - before.now_s
        _add(self._phase_s, now.phase_s, before.phase_s)
        _add(self._phase_cpu_s, now.phase_cpu_s, before.phase_cpu_s)


def _add(sums: dict[Phase, float], now: Mapping[Phase, float], before: Mapping[Phase, float]) -> None:
    for phase, spent in now.items():
        sums[phase] = sums.get(phase, 0.0) + spent - before.get(phase, 0.0)
