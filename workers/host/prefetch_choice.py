"""`PrefetchChoice`: whether a host wants the next step's vectors prefetched, by what its own steps take.

To prefetch, a host first finds what the step under way does not touch: it *splits* the next step's vectors. That time
is lost unless the host would have waited for its device anyway. So prefetching pays where the wait is longer than the
split. Both are measured as the run goes on, so a few steps are taken the other way now and then. No number depends on
the choice.

The hosts need not agree: where one of them wants it, all prefetch.
"""

from __future__ import annotations

from collections import deque

from podembed.workers.host.exchange import PREFETCH_RETRY_AT, PREFETCH_RETRY_STEPS

_WAITS = 3
# A host that has not tried yet does so in one step of these; not in the first one of a window.
_FIRST_TRY_STEPS, _FIRST_TRY_AT = 8, 5
# Once chosen, it is kept until it costs clearly more than it saves; otherwise equal costs would change it all the time.
_KEPT_FROM = 0.8


class PrefetchChoice:
    """The choice of one host. Mutated: what it saw.

    Args:
      declared: `JobConfig.overlap`; None measures.
    """

    def __init__(self, declared: bool | None) -> None:
        self._declared = declared
        self._waits_s: deque[float] = deque(maxlen=_WAITS)
        self._pays: bool | None = None

    def wants(self, step: int) -> bool:
        """Whether this host wants the vectors of a step prefetched."""
        if self._declared is not None:
            return self._declared
        if self._pays is None:
            return step % _FIRST_TRY_STEPS == _FIRST_TRY_AT and len(self._waits_s) == _WAITS
        # Right after the steps in which all hosts try it, two steps show how long a host waits without.
        return self._pays and (step - PREFETCH_RETRY_AT) % PREFETCH_RETRY_STEPS not in (1, 2)

    def saw_wait(self, seconds: float) -> None:
        """A host that had prefetched nothing waited so long for its device."""
        self._waits_s.append(seconds)

    def saw_split(self, seconds: float) -> None:
        """It took so long to find what could be prefetched."""
        if self._waits_s:
            # The shortest one: the first step compiles, and a busy machine makes any step longer.
            wait_s = min(self._waits_s)
            self._pays = wait_s > (_KEPT_FROM * seconds if self._pays else seconds)
