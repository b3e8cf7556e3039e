"""Of which processes the next generation is made, on a scripted backend that can keep hosts; and what becomes of the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import Failure, FailureKind
from podembed.orchestrator.group.survivors import MAX_ATTEMPTS, Groups, who_goes_on
from podembed.orchestrator.group.worker_group import Deadlines, Handle, HostHandles, Rejoining, WorkerGroup
from podembed.workers.liveness.worker import Worker
from tests.orchestrator.group.test_worker_group import NEVER, ScriptedBackend, ScriptedHandle, failure, progress
from tests.sentences import saying

QUICK = Deadlines(start_s=20.0, step_s=20.0)


@dataclass
class KeepingBackend(ScriptedBackend):
    """Remembers which processes were ended, in order."""

    ended: list[Worker] = field(default_factory=list)
    relaunched: list[tuple[int | None, ...]] = field(default_factory=list)
    num_launches: int = 0
    num_standbys: int = 0
    has_room: bool = True
    unfit: frozenset[int] = frozenset()
    called: list[Worker] = field(default_factory=list)

    def answer_of(self, worker: Worker, method: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        if method == "control status":
            self.called.append(worker)
        return super().answer_of(worker, method, arguments)

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        self.num_launches += 1
        return super().launch(num_hosts, on_wait)

    def end(self, workers: Sequence[Handle]) -> None:
        self.ended += [worker.worker for worker in workers]

    def fit(self, handles: Sequence[HostHandles]) -> frozenset[int]:
        return frozenset(range(len(handles))) - self.unfit

    def relaunch(
        self, handles: Sequence[HostHandles], kept: Sequence[int | None], on_wait: Callable[[], None]
    ) -> Sequence[HostHandles]:
        if not self.has_room:
            raise ConfigurationError("no room")
        self.relaunched.append(tuple(kept))
        return [
            HostHandles(
                handles[old].host if old is not None else ScriptedHandle(Worker("host", rank), self),
                ScriptedHandle(Worker("device", rank), self),
            )
            for rank, old in enumerate(kept)
        ]

    def stand_by(
        self, handles: Sequence[HostHandles], job: Any, table_buckets: tuple[int, ...], lease: Any = None
    ) -> None:
        self.num_standbys += 1


def backend_of(script: dict[tuple[Worker, str], Any]) -> KeepingBackend:
    def answer(worker: Worker, method: str) -> Any:
        return script.get((worker, method), progress(1) if method == "control status" else None)

    return KeepingBackend(answer)


def groups_of(backend: ScriptedBackend, *, standby_after_s: float | None = None) -> tuple[Groups, list[str]]:
    notices: list[str] = []
    return Groups(backend, standby_after_s=standby_after_s, emit=saying(notices), clock=backend.clock), notices


def after(groups: Groups, num_hosts: int = 3) -> tuple[WorkerGroup, dict[int, int]]:
    return groups.next(num_hosts, deadlines=QUICK, on_poll=nothing)


def nothing() -> None: ...


def test_the_protocol_is_told_from_that_of_plain_backends() -> None:
    assert isinstance(backend_of({}), Rejoining)
    assert not isinstance(ScriptedBackend(lambda worker, method: None), Rejoining)


def test_hosts_that_answer_go_on_and_all_else_is_ended() -> None:
    """Host 1 is dead; all devices go with it."""
    dead: Failure = failure(Worker("host", 1), FailureKind.DIED)
    backend = backend_of({(Worker("host", 1), method): dead for method in ("control abort", "settle")})
    groups, _ = groups_of(backend)
    first, kept = after(groups)
    assert kept == {}
    groups.salvage(first, "host 1 died")
    assert backend.ended == [Worker("device", 0), Worker("device", 1), Worker("device", 2), Worker("host", 1)]
    assert first.is_stopped
    second, kept = after(groups)
    assert (kept, backend.relaunched) == ({0: 0, 2: 2}, [(0, None, 2)])
    assert second.handles[0].host is first.handles[0].host
    first.stop()
    groups.stop()
    assert (backend.num_stops, backend.num_launches) == (0, 1), "what lives on belongs to the next generation"


def test_hosts_on_machines_that_leave_are_ended_and_a_smaller_group_keeps_the_others() -> None:
    backend = backend_of({})
    groups, _ = groups_of(backend)
    first, _ = after(groups)
    groups.salvage(first, "a machine drains")
    assert Worker("host", 1) not in backend.ended
    backend.unfit = frozenset({1})
    _, kept = after(groups, 2)
    assert (kept, backend.relaunched) == ({0: 0, 1: 2}, [(0, 2)])
    assert backend.ended[-1] == Worker("host", 1)


def test_survivors_that_all_have_to_leave_are_given_up_aloud() -> None:
    backend = backend_of({})
    groups, notices = groups_of(backend)
    groups.salvage(after(groups)[0], "a test")
    backend.unfit = frozenset({0, 1, 2})
    assert after(groups)[1] == {}
    assert (backend.num_stops, backend.num_launches) == (1, 2)
    assert "no machine of theirs" in notices[0]


@pytest.mark.parametrize("method", ["control abort", "settle"])
def test_a_host_that_does_not_end_what_it_does_in_time_is_lost(method: str) -> None:
    backend = backend_of({(Worker("host", 2), method): NEVER})
    group = WorkerGroup(backend, backend.launch(3, nothing), QUICK, nothing, clock=backend.clock)
    assert group.salvage("a test") == frozenset({0, 1})
    assert backend.ended[-1] == Worker("host", 2)


def test_with_no_host_left_everything_is_stopped_and_begins_anew() -> None:
    backend = backend_of({(Worker("host", at), "settle"): NEVER for at in range(3)})
    groups, _ = groups_of(backend)
    first, _ = after(groups)
    groups.salvage(first, "a test")
    assert backend.num_stops == 1
    _, kept = after(groups)
    assert (kept, backend.num_launches) == ({}, 2)


def test_a_backend_that_cannot_keep_hosts_is_stopped_and_begins_anew() -> None:
    backend = ScriptedBackend(lambda worker, method: None)
    groups, _ = groups_of(backend)
    first, _ = after(groups)
    groups.salvage(first, "a test")
    assert backend.num_stops == 1
    assert after(groups)[1] == {}


def test_what_no_generation_took_over_is_stopped_at_the_end() -> None:
    backend = backend_of({})
    groups, _ = groups_of(backend)
    first, _ = after(groups)
    groups.salvage(first, "a test")
    groups.stop()
    groups.stop()
    assert backend.num_stops == 1


def test_hosts_that_live_on_are_called_while_the_next_generation_waits_for_others() -> None:
    """Their own generation has no heartbeat any more: by calls alone they know that their driver lives."""

    class Waiting(KeepingBackend):
        def relaunch(
            self, handles: Sequence[HostHandles], kept: Sequence[int | None], on_wait: Callable[[], None]
        ) -> Sequence[HostHandles]:
            on_wait()
            return super().relaunch(handles, kept, on_wait)

    backend = Waiting(
        lambda worker, method: failure(Worker("host", 1), FailureKind.DIED) if worker == Worker("host", 1) else None
    )
    groups, _ = groups_of(backend)
    groups.ping_survivors()
    first, _ = after(groups)
    groups.ping_survivors()
    groups.salvage(first, "host 1 died")
    assert backend.called == []
    groups.ping_survivors()
    groups.ping_survivors()
    assert backend.called == [Worker("host", 0), Worker("host", 2)] * 2
    groups.next(1, deadlines=QUICK, on_poll=groups.ping_survivors)
    assert backend.called[4:] == [Worker("host", 0)], "while places are looked for, too, but for one that was ended"
    groups.ping_survivors()
    assert len(backend.called) == 5, "from here on its group calls it"


def test_hosts_that_were_ended_are_not_called() -> None:
    backend = backend_of({})
    groups, _ = groups_of(backend)
    groups.salvage(after(groups)[0], "a test")
    groups.stop()
    groups.ping_survivors()
    assert backend.called == []


def test_without_a_heartbeat_all_workers_of_the_running_generation_are_called() -> None:
    """Most are called at a window's end only, and none while training waits for a storage that takes no writes."""
    backend = backend_of({})
    groups, _ = groups_of(backend)
    groups.ping_survivors(all_workers=True)
    group, _ = after(groups, 2)
    groups.ping_survivors(all_workers=True)
    assert backend.called == [Worker("host", 0), Worker("device", 0), Worker("host", 1), Worker("device", 1)]
    group.stop()
    groups.ping_survivors(all_workers=True)
    assert len(backend.called) == 4


def test_survivors_are_tried_a_few_times_in_a_row_and_training_makes_that_new() -> None:
    backend = backend_of({})
    groups, _ = groups_of(backend)

    def fail_at_the_start() -> int:
        group, kept = after(groups)
        groups.salvage(group, "a test")
        return len(kept)

    assert [fail_at_the_start() for _ in range(MAX_ATTEMPTS + 2)] == [0] + [3] * MAX_ATTEMPTS + [0]
    assert backend.num_stops == 1
    group, kept = after(groups)
    assert len(kept) == 3
    groups.trained(group, "job", ())  # type: ignore[arg-type]
    groups.salvage(group, "a test")
    assert len(after(groups)[1]) == 3


def test_survivors_that_cannot_be_used_are_given_up_aloud() -> None:
    backend = backend_of({})
    groups, notices = groups_of(backend)
    first, _ = after(groups)
    groups.salvage(first, "a test")
    backend.has_room = False
    assert after(groups)[1] == {}
    assert backend.num_stops == 1
    assert "started anew: no room" in notices[0]


@pytest.mark.parametrize(("after_s", "expected"), [(0.0, 1), (3600.0, 0), (None, 0)])
def test_standbys_are_started_once_a_generation_after_a_while(after_s: float | None, expected: int) -> None:
    backend = backend_of({})
    groups, _ = groups_of(backend, standby_after_s=after_s)
    group, _ = after(groups)
    for _ in range(3):
        groups.trained(group, "job", ())  # type: ignore[arg-type]
    assert backend.num_standbys == expected
    groups.salvage(group, "a test")
    group, _ = after(groups)
    groups.trained(group, "job", ())  # type: ignore[arg-type]
    assert backend.num_standbys == 2 * expected


@pytest.mark.parametrize(
    ("alive", "num_before", "num_hosts", "expected"),
    [
        ({0, 2}, 3, 3, (0, None, 2)),
        ({0, 1, 2}, 3, 2, (0, 1)),
        ({0, 2}, 3, 2, (0, 2)),
        ({1}, 2, 4, (None, 1, None, None)),
        (set(), 2, 2, (None, None)),
    ],
)
def test_hosts_keep_their_numbers_where_they_can(
    alive: set[int], num_before: int, num_hosts: int, expected: tuple[int | None, ...]
) -> None:
    assert who_goes_on(frozenset(alive), num_before=num_before, num_hosts=num_hosts) == expected


@dataclass
class SeatedBackend(KeepingBackend):
    """Numbers hosts by their machines, and has none for the first two any more."""

    def seats(self, handles: Sequence[HostHandles], alive: frozenset[int], num_hosts: int) -> Sequence[int | None]:
        assert alive == {1, 2}
        return (2, None)


def test_a_backend_that_knows_the_seats_of_hosts_is_asked_for_them() -> None:
    dead: Failure = failure(Worker("host", 0), FailureKind.DIED)
    script = {(Worker("host", 0), method): dead for method in ("control abort", "settle")}

    def answer(worker: Worker, method: str) -> Any:
        return script.get((worker, method), progress(1) if method == "control status" else None)

    backend = SeatedBackend(answer)
    groups, _ = groups_of(backend)
    first, _ = after(groups)
    groups.salvage(first, "host 0 died")
    second, kept = after(groups, 2)
    assert (kept, backend.relaunched) == ({0: 2}, [(2, None)])
    assert second.handles[0].host is first.handles[2].host
    assert backend.ended[-1] == Worker("host", 1), "there is no seat for it"
    groups.stop()
