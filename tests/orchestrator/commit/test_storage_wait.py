"""Waiting for a storage that is away: as long as is allowed and not longer, and never for damage."""

from __future__ import annotations

from itertools import pairwise

import pytest

from podembed.orchestrator.api.signals import StoppedAtStart, StopSignals
from podembed.orchestrator.commit.storage_wait import FIRST_WAIT_S, LONGEST_WAIT_S, StorageWait
from podembed.workers.storage.storage_errors import NameNotFound, StorageError, StorageFull, StoreUnavailable
from tests.clock import FakeClock
from tests.sentences import saying

AWAY = StoreUnavailable("read 'x'", attempts=6, elapsed_s=60.0, last=TimeoutError("slow"))


class Away:
    """A question that is answered from some moment on. `asked_s`: when it was asked."""

    def __init__(self, clock: FakeClock, error: Exception, *, until_s: float) -> None:
        self._clock, self._error, self._until_s = clock, error, until_s
        self.asked_s: list[float] = []

    def __call__(self) -> str:
        self.asked_s.append(self._clock.now_s - 100.0)
        if self._clock.now_s < self._until_s:
            raise self._error
        return "answer"


def waiting(
    clock: FakeClock, notices: list[str], *, timeout_s: float = 600.0, stop: StopSignals | None = None
) -> StorageWait:
    return StorageWait(timeout_s, stop=stop or StopSignals(), emit=saying(notices), clock=clock)


@pytest.mark.parametrize(
    "error", [AWAY, StorageFull("write 'x'", OSError(28, "full")), OSError(5, "input/output error")]
)
def test_it_asks_at_growing_intervals_until_there_is_an_answer(error: Exception) -> None:
    clock, notices = FakeClock(), []
    away = Away(clock, error, until_s=300.0)
    assert waiting(clock, notices)(away) == "answer"
    waits = [later - earlier for earlier, later in zip(away.asked_s, away.asked_s[1:], strict=False)]
    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits == sorted(waits)
    assert max(waits) == LONGEST_WAIT_S
    assert len(notices) == 1
    assert "asked again for up to 600 s" in notices[0]


def test_the_time_is_kept() -> None:
    clock, notices = FakeClock(), []
    away = Away(clock, AWAY, until_s=1e9)
    with pytest.raises(StoreUnavailable):
        waiting(clock, notices)(away)
    assert 600.0 - LONGEST_WAIT_S <= clock.now_s - 100.0 <= 600.0
    away = Away(clock, AWAY, until_s=1e9)
    with pytest.raises(StoreUnavailable):
        waiting(clock, notices, timeout_s=0.0)(away)
    assert len(away.asked_s) == 1


def test_an_error_of_the_operating_system_that_stays_is_the_storages() -> None:
    """Which is told in a sentence; a bare OSError would look like one of the job."""
    clock = FakeClock()
    with pytest.raises(StoreUnavailable, match="failed [0-9]+ times .* OSError: .*input/output error"):
        waiting(clock, [])(Away(clock, OSError(5, "input/output error"), until_s=1e9))


@pytest.mark.parametrize("error", [NameNotFound("x", "here"), StorageError("damaged"), ValueError("no storage")])
def test_what_is_no_outage_is_not_waited_for(error: Exception) -> None:
    clock, notices = FakeClock(), []
    away = Away(clock, error, until_s=300.0)
    with pytest.raises(type(error)):
        waiting(clock, notices)(away)
    assert (len(away.asked_s), notices) == (1, [])


def test_a_run_that_is_to_end_does_not_wait() -> None:
    """It was asked to: that is no error of the storage, after which a supervisor would not begin again."""
    clock, notices, stop = FakeClock(), [], StopSignals()

    def ask() -> str:
        if clock.now_s > 104.0:
            stop.request("SIGTERM")
        raise AWAY

    with pytest.raises(StoppedAtStart):
        waiting(clock, notices, stop=stop)(ask)
    assert clock.now_s < 110.0
    assert notices[-1].startswith("the run ends without waiting for the storage. ")
    assert str(AWAY) in notices[-1]


def test_damage_is_reported_also_to_a_run_that_is_to_end() -> None:
    stop = StopSignals()
    stop.request("SIGTERM")
    away = Away(FakeClock(), StorageError("damaged"), until_s=300.0)
    with pytest.raises(StorageError, match="damaged"):
        waiting(FakeClock(), [], stop=stop)(away)


def test_others_hear_of_it_meanwhile() -> None:
    """Hosts that live on would end themselves, where they can read a storage that the driver cannot write."""
    clock, called_s = FakeClock(), []
    away = Away(clock, StorageFull("write 'x'", OSError(28, "full")), until_s=300.0)
    meanwhile = lambda: called_s.append(clock.now_s)  # noqa: E731
    wait = StorageWait(600.0, stop=StopSignals(), emit=lambda event: None, clock=clock, meanwhile=meanwhile)
    assert wait(away) == "answer"
    assert max(after - before for before, after in pairwise([100.0, *called_s, clock.now_s])) < 5.0
