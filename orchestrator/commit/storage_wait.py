"""Waiting for a storage that is away, where a run cannot go on without it: while it claims its next generation.

Between two commits training goes on without the storage, and a save that it fails is another one's business
(`background_commit`). After a fault nothing trains, so the driver asks again until there is an answer or the time is
over. Damage is no outage and is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.signals import StoppedAtStart, StopSignals
from podembed.orchestrator.events.commits import StorageAwaited, StorageNotAwaited
from podembed.orchestrator.events.event import Emit
from podembed.workers.storage.storage_errors import ServiceRefused, StorageError, StorageFull, StoreUnavailable

Answer = TypeVar("Answer")

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
_LOOK_S = 0.25


def is_away(error: BaseException) -> bool:
    """Whether a storage that failed so may answer later: it was not reached, has no room, or refuses rights that can be
    renewed.
    """
    return isinstance(error, StoreUnavailable | StorageFull | ServiceRefused | OSError)


class StorageWait:
    """Repeats a request to the storage until it succeeds or the time is over.

    Args:
      timeout_s: seconds for each request; 0 never repeats one.
      stop: signals of the user. A run that was asked to end does not wait.
      emit: listener for the event that a wait begins.
      meanwhile: function that is called several times a second during a wait.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        stop: StopSignals,
        emit: Emit,
        clock: Clock,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._stop = stop
        self._emit = emit
        self._meanwhile = meanwhile

    def __call__(self, ask: Callable[[], Answer]) -> Answer:
        """The answer.

        Raises:
          StorageError: what `ask` raised when the time was over; errors of the operating system come as
            `StoreUnavailable`.
          Exception: what `ask` raised, if it is no outage.
          StoppedAtStart: the run was asked to end meanwhile; what is committed stands.
        """
        started_s, wait_s = self._clock.monotonic_s(), FIRST_WAIT_S
        attempts = 0
        while True:
            attempts += 1
            try:
                return ask()
            except Exception as error:
                over_s = started_s + self._timeout_s
                if not is_away(error):
                    raise
                if self._stop.reason is not None:
                    self._emit(StorageNotAwaited(reason=f"{type(error).__name__}: {error}"))
                    raise StoppedAtStart(self._stop.reason) from error
                # A wait that would end after the time is not begun.
                if self._clock.monotonic_s() + wait_s > over_s:
                    if isinstance(error, StorageError):
                        raise
                    elapsed_s = self._clock.monotonic_s() - started_s
                    raise StoreUnavailable(
                        "asking the storage", attempts=attempts, elapsed_s=elapsed_s, last=error
                    ) from error
                # Once per outage, not per attempt.
                if wait_s == FIRST_WAIT_S:
                    reason = f"{type(error).__name__}: {error}"
                    self._emit(StorageAwaited(timeout_s=self._timeout_s, reason=reason))
            self._rest(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _rest(self, seconds: float) -> None:
        until_s = self._clock.monotonic_s() + seconds
        while (left_s := until_s - self._clock.monotonic_s()) > 0 and self._stop.reason is None:
            self._meanwhile()
            self._clock.sleep(min(_LOOK_S, left_s))


def at_once(ask: Callable[[], Answer]) -> Answer:
    """Asks once."""
    return ask()
