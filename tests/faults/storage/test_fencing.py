"""A driver that is frozen loses its run: its workers end themselves, another driver goes on, and the old one leaves
when it wakes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from podembed.orchestrator.api.run_errors import EXIT_FENCED
from podembed.orchestrator.commit.lease_files import read_claims, read_head, read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.workers.storage.store import Store
from tests.jobs.cli.test_main import run
from tests.long_tests import is_long
from tests.processes import wait_for

ROOT = Path(__file__).parents[3]
PATIENCE_S = 900.0
LEASE_TIMEOUT_S = 15.0


def workers_of(driver: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(("ray::_HostActor", "ray::_DeviceActor")):
                found.append(process)
    return found


@is_long
@pytest.mark.ray
@pytest.mark.slow
def test_a_frozen_driver_is_fenced_and_its_workers_go_by_themselves(small_data: str, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    store = Store(url)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.storage.fenced_process", small_data, str(tmp_path), str(LEASE_TIMEOUT_S)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    driver = psutil.Process(program.pid)
    family: list[psutil.Process] = []
    try:
        wait_for("second commit", lambda: len(read_lineage(store)) >= 2, seconds=PATIENCE_S)
        # Two hosts with their devices; and standing by a host and two devices.
        wait_for("processes that stand by", lambda: len(workers_of(driver)) == 7, seconds=PATIENCE_S)
        family = driver.children(recursive=True)
        workers = workers_of(driver)
        assert len(workers) == 7
        program.send_signal(signal.SIGSTOP)
        gone_s = wait_for(
            "end of the workers",
            lambda: not any(w.is_running() and w.status() != "zombie" for w in workers),
            seconds=PATIENCE_S,
        )
        print(f"workers were gone {gone_s:.1f} s after their driver froze")
        # The timeout, and the pauses between looks.
        assert gone_s <= LEASE_TIMEOUT_S * 1.5 + 2.0

        step = (parse_commit_name(read_head(store) or "") or (0, 0))[0]
        code, out, err = run("resume", url, "--in-process", "--take-over", "--max-steps", str(step + 7))
        assert code == 0, err
        head = read_head(store)
        assert parse_commit_name(head or "") == (step + 7, 2)

        program.send_signal(signal.SIGCONT)
        _, errors = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == EXIT_FENCED, errors[-2000:]
        assert "Generation 2 of the run" in errors
        assert (read_head(store), read_claims(store)) == (head, [1, 2]), "the old driver changed the run"
        code, out, _ = run("fsck", url)
        assert code == 0, out
    finally:
        for process in [driver, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        program.wait(timeout=120)
        assert program.stderr is not None
        program.stderr.close()
