"""Real driver processes that fight for one run on a real disk."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from podembed.orchestrator.api.run_errors import EXIT_FENCED
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.lease_files import read_commit_names, read_lineage
from podembed.workers.storage.store import Store
from tests.long_tests import long_case
from tests.orchestrator.commit.checkpoint_samples import holder
from tests.orchestrator.commit.races.lease_races import finish, race, start
from tests.processes import wait_for


def test_three_drivers_at_once_make_one_history(tmp_path: Path) -> None:
    """The short form of `make lease-races`."""
    races = race(tmp_path / "run", rounds=20, timeout_s=300.0)
    assert races.num_fenced > 0, "they have met"


def test_a_driver_frozen_between_publishing_and_acknowledging_wakes_up_fenced(tmp_path: Path) -> None:
    frozen = start(tmp_path / "run", 1, 1, "pause")
    store = Store(tmp_path / "run")
    try:
        wait_for("commit", lambda: bool(read_commit_names(store)), seconds=120)
        successor = acquire(store, holder=holder(), take_over=True)
        # Published before our claim, so it counts, though its own driver will never say so.
        assert successor.head == "s000000001-g00000001"
        successor.publish("s000000002-g00000002", b"{}")
        before = store.sizes()
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    assert finish(frozen) == []
    assert frozen.returncode == EXIT_FENCED
    assert store.sizes() == before
    assert read_lineage(store) == ("s000000002-g00000002", "s000000001-g00000001")


@pytest.mark.parametrize("delay_s", [long_case(0.0), long_case(0.02), 0.05, long_case(0.1)])
def test_a_driver_killed_at_any_time_loses_nothing_that_it_said(tmp_path: Path, delay_s: float) -> None:
    process = start(tmp_path / "run", 1, 10_000)
    assert process.stdout is not None
    said = [process.stdout.readline().strip()]
    time.sleep(delay_s)
    process.kill()
    # Not by communicate, which knows nothing of what readline has already buffered.
    said += process.stdout.read().split()
    process.wait(timeout=120)
    store = Store(tmp_path / "run")
    lineage = read_lineage(store)
    assert set(said) <= set(lineage)
    assert len(lineage) <= len(said) + 1
    assert acquire(store, holder=holder()).head == lineage[0]
