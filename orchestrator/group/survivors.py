"""`Groups`: of which processes the next generation is made.

Normally all are new. After a host fault or a change of the number of hosts, surviving host processes keep their rows,
and new ones take the other places. Processes that stand by make the new ones quick. If any of this fails, all processes
end. The next generation is then made of new ones, which need nothing but the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock, at_most_every
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.run import SurvivorsDropped
from podembed.orchestrator.group.backend import Backend, HostHandles, Rejoining, Seating
from podembed.orchestrator.group.calls import status
from podembed.orchestrator.group.watch import Deadlines
from podembed.orchestrator.group.worker_group import WorkerGroup
from podembed.workers.job.reference import AnyJob

# Generations in a row that may begin with survivors without one of them having got to its first step.
MAX_ATTEMPTS = 3

PING_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Remnant:
    """The processes of a generation after a fault. Those of the hosts `alive` live."""

    backend: Rejoining
    handles: Sequence[HostHandles]
    alive: frozenset[int]


class Groups:
    """The worker groups of one run, one after another.

    Args:
      standby_after_s: seconds of training until standby processes are started; None for none.
      emit: listener for the event that survivors are not used after all.
      clock: time, replaced in tests.

    Attributes:
      ping_at_times: `ping_survivors`, if the last call was long enough ago. To be called often.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        standby_after_s: float | None,
        emit: Emit,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._backend = backend
        self._standby_after_s = standby_after_s
        self._emit = emit
        self._clock = clock
        self.ping_at_times = at_most_every(PING_EVERY_S, self.ping_survivors, clock.monotonic_s)
        self._remnant: _Remnant | None = None
        self._group: WorkerGroup | None = None
        self._attempts = 0
        self._trains_since_s: float | None = None

    def next(
        self, num_hosts: int, *, deadlines: Deadlines, on_poll: Callable[[], None]
    ) -> tuple[WorkerGroup, dict[int, int]]:
        """The processes of the next generation, launched, and its hosts that live on from the one before, with the
        number that each had there.

        Raises:
          ConfigurationError, WorkerFailure: the cluster has no room, or not any more.
        """
        self._trains_since_s = None
        remnant, handles, kept = self._remnant, None, ()
        if remnant is not None:
            try:
                handles, kept = self._relaunched(remnant, num_hosts, on_poll)
            except BaseException as error:
                remnant.backend.stop(remnant.handles)
                if not isinstance(error, ConfigurationError):
                    raise
                self.give_up_survivors(str(error))
            finally:
                self._remnant = None
        if handles is None:
            handles = self._backend.launch(num_hosts, on_poll)
        group = self._group = WorkerGroup(self._backend, handles, deadlines, on_poll, clock=self._clock)
        return group, {rank: old for rank, old in enumerate(kept) if old is not None}

    def _relaunched(
        self, remnant: _Remnant, num_hosts: int, on_poll: Callable[[], None]
    ) -> tuple[Sequence[HostHandles], tuple[int | None, ...]]:
        alive = remnant.alive & remnant.backend.fit(remnant.handles)
        if not alive:
            raise ConfigurationError("no machine of theirs may be used any more")
        if isinstance(remnant.backend, Seating):
            kept = tuple(remnant.backend.seats(remnant.handles, alive, num_hosts))
        else:
            kept = who_goes_on(alive, num_before=len(remnant.handles), num_hosts=num_hosts)
        remnant.backend.end([remnant.handles[rank].host for rank in remnant.alive if rank not in kept])
        self._remnant = replace(remnant, alive=remnant.alive.intersection(kept))
        return remnant.backend.relaunch(remnant.handles, kept, on_poll), kept

    def ping_survivors(self, *, all_workers: bool = False) -> None:
        """Calls the hosts that live on, without waiting for answers. A host ends itself when it hears nothing of its
        driver and finds no new heartbeat of that driver's generation. To be called often while the driver waits for
        other hosts or for the storage.

        Args:
          all_workers: also those of the generation that runs; for a driver that cannot write its heartbeat.
        """
        if (remnant := self._remnant) is not None:
            for rank in sorted(remnant.alive):
                status(remnant.handles[rank].host)
        if all_workers and self._group is not None and not self._group.is_stopped:
            for pair in self._group.handles:
                status(pair.host)
                status(pair.device)

    def give_up_survivors(self, why: str) -> None:
        """The next generation is made of new processes."""
        self._attempts = MAX_ATTEMPTS
        self._emit(SurvivorsDropped(reason=why))

    def salvage(self, group: WorkerGroup, reason: str) -> None:
        """Ends a generation; what lives on is used for the next one."""
        self._attempts += 1
        alive = group.salvage(reason) if self._attempts <= MAX_ATTEMPTS else frozenset()
        if alive and isinstance(self._backend, Rejoining):
            self._remnant = _Remnant(self._backend, group.handles, alive)
        else:
            group.stop()
            self._attempts = 0

    def trained(self, group: WorkerGroup, job: AnyJob, table_buckets: tuple[int, ...]) -> None:
        """Notes that the generation works; after a while it gets standby processes. To be called after each window."""
        self._attempts = 0
        now_s = self._clock.monotonic_s()
        if self._trains_since_s is None:
            self._trains_since_s = now_s
        if self._standby_after_s is not None and now_s - self._trains_since_s >= self._standby_after_s:
            group.stand_by(job, table_buckets)
            # Once a generation; the next one replaces those that it took.
            self._trains_since_s = float("inf")

    def stop(self) -> None:
        """Ends what no generation has taken over. Safe to call twice."""
        # Taken first, so that a second call stops nothing twice.
        remnant, self._remnant = self._remnant, None
        if remnant is not None:
            remnant.backend.stop(remnant.handles)


def who_goes_on(alive: frozenset[int], *, num_before: int, num_hosts: int) -> tuple[int | None, ...]:
    """Per host of the next generation, which host of the one before it is; None for a new process.

    Hosts keep their numbers, so that with equally many of them all buckets stay where they are. Of more hosts than
    there are numbers, the others take free ones.
    """
    taken: list[int | None] = [rank if rank in alive and rank < num_before else None for rank in range(num_hosts)]
    others = sorted(rank for rank in alive if rank >= num_hosts)
    for rank in range(num_hosts):
        if taken[rank] is None and others:
            taken[rank] = others.pop(0)
    return tuple(taken)
