"""`HeadWatch`: whether the head of a Ray cluster that others started takes connections. Knows sockets, not Ray.

With its head gone, Ray lets a call wait. After a minute it ends the program from within, with code 1 and no word of
what is committed. This class therefore tries the head before anything is asked of it, and gives a silent one up
earlier. The driver's thread alone uses this.
"""

from __future__ import annotations

from collections.abc import Callable

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.run_errors import TooFewHosts
from podembed.orchestrator.cluster.places import taking_connections
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.machines import HeadBack, HeadSilent

# A head that tolerates faults is started again by others. Ray ends the program after 60 s.
PATIENCE_S = 30.0
# Between generations nothing goes on without it.
IDLE_PATIENCE_S = 10.0
LOOK_S = 1.0


class HeadWatch:
    """See the module. Mutated: since when the head is silent.

    Args:
      address: host and port of the head.
      emit: callback that is told once when it falls silent and once when it is back.
      clock, takes: time, and whether somebody takes a connection there; replaced in tests.
    """

    def __init__(
        self,
        address: str,
        *,
        emit: Emit,
        clock: Clock = SYSTEM_CLOCK,
        takes: Callable[[str], bool] | None = None,
    ) -> None:
        self._address = address
        self._emit = emit
        self._clock = clock
        self._takes = takes or _takes
        self._silent_since_s: float | None = None
        self._looked_s = float("-inf")

    def answers(self) -> bool:
        """Whether it takes a connection now. At most `places.CONNECT_S`, as a rule a millisecond."""
        self._looked_s = self._clock.monotonic_s()
        if self._takes(self._address):
            if self._silent_since_s is not None:
                self._emit(HeadBack(address=self._address))
            self._silent_since_s = None
            return True
        if self._silent_since_s is None:
            self._silent_since_s = self._looked_s
            self._emit(HeadSilent(address=self._address, timeout_s=PATIENCE_S, idle_timeout_s=IDLE_PATIENCE_S))
        return False

    def lost(self, patience_s: float = PATIENCE_S) -> str | None:
        """What is to be said if it has been silent for too long, else None. Tries it once a second at most."""
        if self._clock.monotonic_s() - self._looked_s >= LOOK_S:
            self.answers()
        if self._silent_since_s is None or (silent_s := self._clock.monotonic_s() - self._silent_since_s) < patience_s:
            return None
        return f"Ray's head at {self._address} has taken no connection for {silent_s:.0f} s"

    def require(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Waits until it answers, for `IDLE_PATIENCE_S` of silence at most.

        Args:
          on_wait: called meanwhile; what it raises is passed on.

        Raises:
          TooFewHosts: it does not.
        """
        while not self.answers():
            if (why := self.lost(IDLE_PATIENCE_S)) is not None:
                raise TooFewHosts(
                    f"{why}. Expected the head of the cluster that the run has joined. What is committed stands: see "
                    "to the cluster, then `podembed resume` goes on; `podembed supervise` does by itself."
                )
            on_wait()
            self._clock.sleep(LOOK_S / 2)


def _takes(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(taking_connections({address: (host.strip("[]"), int(port))}))
