"""`Heartbeat`: how a driver says, while it waits for workers, that it lives; and how it learns that it was replaced."""

from __future__ import annotations

from podembed.orchestrator.api.clock import Clock, at_most_every
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.vanished import RunVanished
from podembed.orchestrator.events.commits import HeartbeatMissed, RunVanishing
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.group.survivors import Groups
from podembed.workers.storage.errors import StorageError

HEARTBEAT_S = 5.0


class Heartbeat:
    """The heartbeat of one generation. Mutated: the time of the last one, and whether the run was gone then."""

    def __init__(self, lease: Lease, groups: Groups, *, emit: Emit, clock: Clock) -> None:
        self._groups = groups
        self._emit = emit
        self._lease = lease
        self._has_vanished = False
        self.poll = at_most_every(HEARTBEAT_S, self._beat, clock.monotonic_s)
        """To be called often. Raises `Fenced` where a newer driver has the run."""

    def _beat(self) -> None:
        """Writes the heartbeat. It is advisory: while the storage is away, training goes on, and commits say themselves
        if they fail.
        """
        self._groups.greet()
        try:
            self._lease.heartbeat()
            self._lease.require_newest()
            self._has_vanished = False
        except RunVanished as error:
            # A disk may come back; whether it has is asked when it matters, at the next commit.
            if not self._has_vanished:
                self._emit(RunVanishing(reason=str(error)))
            self._has_vanished = True
        except (StorageError, OSError) as error:
            self._groups.greet(all_workers=True)
            self._emit(HeartbeatMissed(reason=str(error)))
