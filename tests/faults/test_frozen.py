"""Processes of a real run are stopped by SIGSTOP while they start, train and save: each is found within ten seconds,
and the run goes on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.events.run import GenerationLost
from tests.long_tests import is_long
from tests.orchestrator.driver.test_equality import expected_audit, train_small
from tests.processes import actor_processes
from tests.run_state import committed_state
from tests.small_job import small_job

PATIENCE_S = 600.0
DETECTED_WITHIN_S = 30.0  # three are needed where nothing else runs
NUM_STEPS = 50


class Freezer(SilentReporter):
    """Stops one process in each of three generations: a device process that starts, a host that trains, and one that
    saves.

    Attributes:
      found_s: seconds from each stop to the driver's notice.
      kinds: of the processes that the driver then names.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stopped: list[tuple[int, float]] = []
        self.found_s: list[float] = []
        self.causes: list[str] = []
        self.kinds: list[list[str]] = []
        self._run(lambda: self._stop_when(lambda: True, "DeviceActor"))

    def event(self, event: Event) -> None:
        if isinstance(event, GenerationLost):
            self.causes.append(event.cause)
            self.kinds.append([worker.split()[0] for worker in event.workers])
            self.found_s.append(time.monotonic() - self._stopped[-1][1])
            if len(self.causes) == 2:
                self._run(lambda: self._stop_when(self._is_saving, "HostActor"))

    def window(self, report: WindowReport) -> None:
        if report.generation == 2 and len(self._stopped) == 1 and report.step >= 2:
            self._stop_when(lambda: True, "HostActor")

    def _is_saving(self) -> bool:
        return any(path.is_file() for path in self._folder.glob("data/s000000020-g00000003/**/*"))

    def _run(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def _stop_when(self, is_time: Callable[[], bool], kind: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        known = {process for process, _ in self._stopped}
        while time.monotonic() < deadline:
            found = [process for process in actor_processes(kind) if process not in known] if is_time() else []
            if found:
                os.kill(found[0], signal.SIGSTOP)
                self._stopped.append((found[0], time.monotonic()))
                return
            time.sleep(0.002)

    def still_there(self) -> list[int]:
        """Stopped processes that the run has left behind."""
        return [process for process, _ in self._stopped if os.path.exists(f"/proc/{process}")]


@is_long
@pytest.mark.ray
@pytest.mark.slow
def test_frozen_processes_are_found_killed_and_replaced(ray_cluster: None, small_data: str, tmp_path: Path) -> None:
    freezer = Freezer(tmp_path / "frozen")
    result = train_small(small_data, tmp_path, "frozen", num_hosts=2, max_steps=NUM_STEPS, reporter=freezer)
    print(f"found after {[f'{seconds:.1f}' for seconds in freezer.found_s]} s: {freezer.causes}")
    assert result.step == NUM_STEPS
    assert freezer.kinds == [["device"], ["host"], ["host"]]
    assert all("stopped by a signal" in cause for cause in freezer.causes)
    assert max(freezer.found_s) <= DETECTED_WITHIN_S
    # Ray alone takes five seconds to kill a process that is stopped. On a busy machine one of three may take longer.
    assert min(recovery.stop_s for recovery in result.recoveries) < 4.0
    assert freezer.still_there() == []
    audit = committed_state(result.path)["audit/rows"][:, 0]
    np.testing.assert_allclose(audit, expected_audit(small_job(folder=small_data), NUM_STEPS), atol=1e-3)
