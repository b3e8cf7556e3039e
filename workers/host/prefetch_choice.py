"""`PrefetchChoice`: whether a host wants the next step's vectors prefetched, by what its own steps take.

To prefetch, a host first finds what the step under way does not touch: it *splits* the next step's vectors. That time
is lost unless the host would have waited for its device anyway. So prefetching may pay where the wait is longer than
the split. Both are measured as the run goes on, so a few steps are taken the other way now and then.

Whether it does pay, whole steps tell. Where hosts and devices share their processors, a host that waits leaves its
processor to others, and work in that time makes theirs longer. So there are trials: some steps with prefetch and some
without, in turn, and the shorter ones win. No number depends on the choice.

The hosts need not agree: where one of them wants it, all prefetch. All have their trials in the same steps.
"""

from __future__ import annotations

import statistics
from collections import deque

from podembed.workers.host.exchange import PREFETCH_RETRY_AT, PREFETCH_RETRY_STEPS

_WAITS = 3
# A host that has not tried yet does so in one step of these; not in the first one of a window.
_FIRST_TRY_STEPS, _FIRST_TRY_AT = 8, 5
# Once chosen, it is kept until it costs clearly more than it saves; otherwise equal costs would change it all the time.
_KEPT_FROM = 0.8
# Steps 64 to 87 of each 256 are a trial.
TRIAL_STEPS, TRIAL_AT = 256, 64
# Its parts: with prefetch, without, without, with. So what slows down from step to step is no argument.
_PART, _PARTS = 6, (True, False, False, True)
_FEWEST = 4  # steps of each kind that tell something
# What costs as much takes more processor time.
_FASTER_BY = 0.01


class PrefetchChoice:
    """The choice of one host. Mutated: what it saw.

    Args:
      declared: `JobConfig.overlap`; None measures.
    """

    def __init__(self, declared: bool | None) -> None:
        self._declared = declared
        self._waits_s: deque[float] = deque(maxlen=_WAITS)
        self._pays: bool | None = None
        # Seconds of steps with and without prefetch in the trial under way, and what the last one told.
        self._steps_s: dict[bool, list[float]] | None = None
        self._is_faster = True

    def wants(self, step: int) -> bool:
        """Whether this host wants the vectors of a step prefetched. Asked of each step of training once, in order."""
        if self._declared is not None:
            return self._declared
        if self._pays is None:
            return step % _FIRST_TRY_STEPS == _FIRST_TRY_AT and len(self._waits_s) == _WAITS
        part = (step - TRIAL_AT) % TRIAL_STEPS // _PART
        if part < len(_PARTS):
            self._steps_s = self._steps_s or {True: [], False: []}
            return self._pays and _PARTS[part]
        if self._steps_s is not None:
            self._judge(self._steps_s)
            self._steps_s = None
        # Right after the steps in which all hosts try it, two steps show how long a host waits without.
        is_retry = (step - PREFETCH_RETRY_AT) % PREFETCH_RETRY_STEPS in (1, 2)
        return self._pays and self._is_faster and not is_retry

    def saw_step(self, seconds: float, *, is_prefetching: bool) -> None:
        """A step took so long, between two that were alike: the next ones were prefetched beside both, or beside
        neither.
        """
        if self._steps_s is not None:
            self._steps_s[is_prefetching].append(seconds)

    def saw_wait(self, seconds: float) -> None:
        """Notes the seconds that a host without prefetched vectors waited for its device."""
        self._waits_s.append(seconds)

    def saw_split(self, seconds: float) -> None:
        """Notes the seconds that the split took."""
        if self._waits_s:
            # The shortest one: the first step compiles, and a busy machine makes any step longer.
            wait_s = min(self._waits_s)
            self._pays = wait_s > (_KEPT_FROM * seconds if self._pays else seconds)

    def _judge(self, steps_s: dict[bool, list[float]]) -> None:
        """Compares the steps of a trial. Nothing changes without enough steps of both kinds, as in short windows."""
        if min(map(len, steps_s.values())) < _FEWEST:
            return
        with_it_s, without_s = statistics.median(steps_s[True]), statistics.median(steps_s[False])
        self._is_faster = with_it_s < (1 - _FASTER_BY) * without_s
