"""Real driver processes that fight for one run on a real disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.errors import EXIT_FENCED
from orchestrator.lease import acquire, read_claims, read_commit_names, read_lineage
from orchestrator.manifest import parse_commit_name
from tests.orchestrator.checkpoint_samples import holder
from workers.storage import Store

ROOT = Path(__file__).parents[2]


def start(url: Path, rounds: int, commits: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.orchestrator.racing_driver", str(url), str(rounds), str(commits), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate(timeout=60)
    assert process.returncode in (0, EXIT_FENCED), errors
    return out.split()


def test_three_drivers_at_once_make_one_history(tmp_path: Path) -> None:
    processes = [start(tmp_path / "run", 20, 3) for _ in range(3)]
    acknowledged = [name for process in processes for name in finish(process)]
    store = Store(tmp_path / "run")
    lineage = read_lineage(store)
    assert set(acknowledged) <= set(lineage)
    assert len(acknowledged) == len(set(acknowledged))
    assert len(acknowledged) >= 3, "the last driver always gets through"
    assert read_claims(store) == list(range(1, len(read_claims(store)) + 1))
    assert len(read_claims(store)) >= 60
    order = [parse_commit_name(name) for name in lineage]
    assert order == sorted(order, reverse=True)  # pyright: ignore[reportArgumentType]
    assert not [file for file in os.listdir(tmp_path / "run" / "lease") if file.startswith(".tmp")]


def test_a_driver_frozen_between_publishing_and_acknowledging_wakes_up_fenced(tmp_path: Path) -> None:
    frozen = start(tmp_path / "run", 1, 1, "pause")
    store = Store(tmp_path / "run")
    try:
        deadline = time.monotonic() + 30
        while not read_commit_names(store):
            assert time.monotonic() < deadline
            time.sleep(0.01)
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


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1])
def test_a_driver_killed_at_any_time_loses_nothing_that_it_said(tmp_path: Path, delay_s: float) -> None:
    process = start(tmp_path / "run", 1, 10_000)
    assert process.stdout is not None
    said = [process.stdout.readline().strip()]
    time.sleep(delay_s)
    process.kill()
    said += process.communicate(timeout=30)[0].split()
    store = Store(tmp_path / "run")
    lineage = read_lineage(store)
    assert set(said) <= set(lineage)
    assert len(lineage) <= len(said) + 1
    assert acquire(store, holder=holder()).head == lineage[0]
