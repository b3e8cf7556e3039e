"""`UndisturbedTimer`: what those steps of a window took beside which a host saved nothing.

Where a run saves often, few of its windows are free of a save, but many steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from podembed.workers.liveness.progress import Phase, Spent, Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The steps of one window on one host, in sum.

    Attributes:
      num_steps: that began while no save was under way. `seconds` are of all of them. Each has one lookup.
      phase_s: of each phase in these steps.
      phase_cpu_s: processor seconds of the working thread in each, and between them.
      saving_steps, saving_s: of steps beside a save.
    """

    num_steps: int = 0
    seconds: float = 0.0
    phase_s: Mapping[Phase, float] = field(default_factory=dict)
    phase_cpu_s: Mapping[Phase, float] = field(default_factory=dict)
    saving_steps: int = 0
    saving_s: float = 0.0


class UndisturbedTimer:
    """The timer of one window. Mutated: the sums, and since when a save is under way, or none.

    Saves begin between windows. So a window without one at its beginning has none, and all of it counts. In another
    one, each step counts with the lookup of the next that it makes. The lookup of the first step does not count then,
    and the last step does not count if it looks up nothing.

    Args:
      is_saving: whether a save, or what else reads all rows, is under way.
    """

    def __init__(self, tracker: Tracker, *, is_saving: Callable[[], bool]) -> None:
        self._tracker, self._is_saving = tracker, is_saving
        self._num_steps, self._saving_steps, self._seconds, self._saving_s = 0, 0, 0.0, 0.0
        self._phase_s: dict[Phase, float] = {}
        self._phase_cpu_s: dict[Phase, float] = {}
        self._began_beside_save = self._is_beside_save = is_saving()
        self._since: Spent | None = None if self._began_beside_save else tracker.spent()

    def begin_step(self, *, looks_up_next: bool) -> None:
        """A step that begins while a save is under way is one of the others."""
        if not self._began_beside_save:
            self._num_steps += 1
            return
        is_first = self._since is None and not self._saving_steps and not self._num_steps
        # The first one was looked up beside the save, even if that has ended meanwhile.
        is_beside_save = is_first or (self._is_beside_save and self._is_saving())
        if not looks_up_next:
            self._pause()
            return
        if is_first or is_beside_save != self._is_beside_save:
            self._pause()
            self._since, self._is_beside_save = self._tracker.spent(), is_beside_save
        if is_beside_save:
            self._saving_steps += 1
        else:
            self._num_steps += 1

    def take(self) -> StepTimes:
        """At the end of the window, before the tracker's timers are taken."""
        self._pause()
        return StepTimes(
            num_steps=self._num_steps,
            seconds=self._seconds,
            phase_s=self._phase_s,
            phase_cpu_s=self._phase_cpu_s,
            saving_steps=self._saving_steps,
            saving_s=self._saving_s,
        )

    def _pause(self) -> None:
        before, self._since = self._since, None
        if before is None:
            return
        now = self._tracker.spent()
        if self._is_beside_save:
            self._saving_s += now.now_s - before.now_s
            return
        self._seconds += now.now_s - before.now_s
        _add(self._phase_s, now.phase_s, before.phase_s)
        _add(self._phase_cpu_s, now.phase_cpu_s, before.phase_cpu_s)


def _add(sums: dict[Phase, float], now: Mapping[Phase, float], before: Mapping[Phase, float]) -> None:
    for phase, spent in now.items():
        sums[phase] = sums.get(phase, 0.0) + spent - before.get(phase, 0.0)
