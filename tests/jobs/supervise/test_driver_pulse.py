"""When a supervisor takes its driver for frozen: both signs must stand still, and only its own driver's count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from podembed.jobs.supervise import driver_pulse, supervision
from podembed.jobs.supervise.driver_pulse import (
    FROZEN_ELSEWHERE_S,
    FROZEN_S,
    DriverPulse,
    DriverSigns,
    heartbeat_of,
)
from podembed.jobs.supervise.supervision import LocalRunner, supervise
from podembed.orchestrator.api.signals import StopSignals
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Heartbeat, Holder
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.storage.store import Store

US = Holder(submission="us", hostname="h", process=7, machine="m")


def look(beat: int | None, cpu_s: float | None, state: str = "S") -> DriverSigns:
    heartbeat = None if beat is None else Heartbeat(generation=1, holder=US, written_unix_s=float(beat))
    return DriverSigns(
        heartbeat=heartbeat,
        statistics=None if cpu_s is None else ProcessStatistics(process=7, started=1, cpu_s=cpu_s, state=state),
    )


def killed_after(looks: Iterator[DriverSigns], *, every_s: float = 5.0, until_s: float = 1000.0) -> float | None:
    pulse, now_s = DriverPulse(), 0.0
    while now_s < until_s:
        if pulse.see(next(looks), now_s) is not None:
            return now_s
        now_s += every_s
    return None


def always(seen: DriverSigns) -> Iterator[DriverSigns]:
    while True:
        yield seen


def test_a_stopped_driver_is_killed_after_its_heartbeat_and_its_time_stood_still() -> None:
    assert killed_after(always(look(1, 4.0, "T"))) == FROZEN_S


def test_one_that_works_without_heartbeats_lives_and_so_does_one_that_beats() -> None:
    assert killed_after(look(1, float(at)) for at in range(10_000)) is None
    assert killed_after(look(at, 4.0) for at in range(10_000)) is None


def test_before_it_has_a_lease_only_a_stopped_one_is_killed() -> None:
    assert killed_after(always(look(None, 4.0))) is None
    assert killed_after(always(look(None, 4.0, "T"))) == FROZEN_S


def test_on_another_machine_only_the_heartbeat_can_be_seen_so_it_has_more_time() -> None:
    assert killed_after(always(look(1, None))) == FROZEN_ELSEWHERE_S


def test_a_supervisor_that_was_stopped_itself_kills_nobody_for_that_time() -> None:
    pulse = DriverPulse()
    assert pulse.see(look(1, 4.0), 0.0) is None
    assert pulse.see(look(1, 4.0), 10_000.0) is None


def test_only_the_heartbeat_of_our_own_driver_is_seen(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    assert heartbeat_of(url, lambda holder: True) is None
    acquire(Store(url), holder=US)
    assert heartbeat_of(url, lambda holder: holder.process == 7) is not None
    assert heartbeat_of(url, lambda holder: holder.process == 8) is None
    acquire(Store(url), holder=Holder(submission="they", hostname="h", process=8, machine="m"), take_over=True)
    assert heartbeat_of(url, lambda holder: holder.process == 7) is None


PROGRAM = """
import os, signal, sys
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.workers.storage.store import Store
first = sys.argv[2] == "1"
lease = acquire(Store(sys.argv[1]), holder=Holder.current("attempt"), take_over=True)
if first:
    os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(0)
"""


def test_a_real_driver_that_stops_is_killed_and_the_next_attempt_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_pulse, "FROZEN_S", 1.0)
    monkeypatch.setattr(supervision, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.0)
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "driver.py").write_text(PROGRAM)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    notices: list[str] = []
    url = str(tmp_path / "run")

    class Recording(LocalRunner):
        def start(self, arguments: Sequence[str], attempt: int) -> None:
            super().start([*arguments, str(attempt)], attempt)

    try:
        code = supervise(
            Recording([sys.executable, str(tmp_path / "driver.py"), url]),
            first=[],
            later=[],
            max_failures=5,
            progress=lambda: None,
            notice=notices.append,
            stop=StopSignals(),
            url=url,
        )
        assert code == 0
        assert "written no heartbeat" in notices[0]
        assert signal.SIGKILL.name in notices[1]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
