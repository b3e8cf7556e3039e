"""Faults strike once, where and when the plan says, and are on record before they act."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from podembed.jobs.chaos.plan_file import read_records
from podembed.workers.faults.inject import FaultPoints, ProcessActs, flipped, spoil
from podembed.workers.faults.plan import Fault, FaultPlan


class Watched:
    """Acts that are only noted, with the records that were there at that moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: list[tuple[int, int]] = []
        self.slept: list[float] = []
        self.now_s = 100.0

    @property
    def acts(self) -> ProcessActs:
        return ProcessActs(send_signal=self._send, sleep=self.slept.append, unix_s=lambda: self.now_s)

    def _send(self, number: int) -> None:
        self.sent.append((number, len(read_records(str(self.folder)))))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def points(watched: Watched, *faults: Fault, rank: str = "host 1") -> FaultPoints:
    found = FaultPoints.of(FaultPlan(folder=str(watched.folder), faults=faults), rank, watched.acts)
    assert found is not None
    return found


def test_a_process_that_nothing_can_strike_has_no_points(tmp_path: Path) -> None:
    fault = Fault(point="step.update", action="kill", rank="host 1")
    plan = FaultPlan(folder=str(tmp_path), faults=(fault,))
    assert FaultPoints.of(None, "host 1") is None
    assert FaultPoints.of(plan, "host 11") is None
    assert FaultPoints.of(plan, "device 1") is None
    assert FaultPoints.of(plan, "host 1") is not None


def test_a_kill_strikes_at_its_step_and_is_on_record_first(watched: Watched) -> None:
    faults = points(watched, Fault(point="step.update", action="kill", rank="host 1", step=7))
    faults.hit("step.update", step=6)
    faults.hit("step.gather", step=7)
    assert watched.sent == []
    faults.hit("step.update", step=7, detail="here")
    assert watched.sent == [(signal.SIGKILL, 1)], "the record has to be there before the process goes"
    (record,) = read_records(str(watched.folder))
    assert (record.point, record.step, record.rank, record.detail) == ("step.update", 7, "host 1", "here")
    assert (record.process, record.unix_s) == (os.getpid(), 100.0)


def test_a_fault_does_not_strike_again_when_the_step_is_replayed_by_a_new_process(watched: Watched) -> None:
    fault = Fault(point="step.update", action="kill", step=7)
    points(watched, fault).hit("step.update", step=7)
    points(watched, fault).hit("step.update", step=7)
    points(watched, fault, rank="host 0").hit("step.update", step=7)
    assert len(watched.sent) == 1


def test_nth_counts_the_hits_that_fit(watched: Watched) -> None:
    faults = points(watched, Fault(point="storage.write", action="kill", match="^data/", nth=3))
    for name in ("data/1", "lease/1", "data/2"):
        faults.hit("storage.write", detail=name)
    assert watched.sent == []
    faults.hit("storage.write", detail="data/3")
    assert len(watched.sent) == 1


def test_times_and_seconds_bound_how_often_it_strikes(watched: Watched) -> None:
    faults = points(watched, Fault(point="step.gather", action="delay", times=2, arguments={"seconds": 0.25}))
    for _ in range(5):
        faults.hit("step.gather")
    assert watched.slept == [0.25, 0.25]
    other = Watched(watched.folder / "other")
    other.folder.mkdir()
    lasting = points(other, Fault(point="storage.read", action="delay", for_s=10.0, arguments={"seconds": 1.0}))
    for now_s in (100.0, 109.0, 111.0):
        other.now_s = now_s
        lasting.hit("storage.read")
    assert other.slept == [1.0, 1.0]
    assert len(read_records(str(other.folder))) == 1


def test_a_fault_can_wait_for_another_one(watched: Watched) -> None:
    first = Fault(point="step.update", action="kill", step=3)
    faults = points(watched, first, Fault(point="restore.file", action="kill", after=0, nth=2))
    for _ in range(3):
        faults.hit("restore.file")
    assert watched.sent == []
    faults.hit("step.update", step=3)
    faults.hit("restore.file")
    assert len(watched.sent) == 1, "hits count from the other fault on"
    faults.hit("restore.file")
    assert len(watched.sent) == 2


def test_errors_are_those_that_were_asked_for(watched: Watched) -> None:
    faults = points(
        watched,
        Fault(point="step.gather", action="raise", arguments={"type": "MemoryError", "message": "no room"}),
        Fault(point="step.update", action="no_space"),
    )
    with pytest.raises(MemoryError, match="no room"):
        faults.hit("step.gather")
    with pytest.raises(OSError, match="no space") as full:
        faults.hit("step.update")
    assert full.value.errno == errno.ENOSPC
    faults.hit("step.gather")


def test_what_strikes_data_is_given_to_the_caller(watched: Watched) -> None:
    faults = points(watched, Fault(point="device.gradients", action="nan", step=3))
    arrays = [np.ones(4, np.float32), np.ones((2, 2), np.float32)]
    spoil(faults, "device.gradients", step=2, arrays=arrays)
    assert all(np.isfinite(array).all() for array in arrays)
    spoil(faults, "device.gradients", step=3, arrays=arrays)
    assert all(np.isnan(array).all() for array in arrays)


def test_a_flip_turns_one_bit() -> None:
    data = bytes(range(16))
    for arguments in ({}, {"byte": 3, "bit": 6}, {"byte": 99}):
        changed = flipped(data, arguments)
        bits = sum((a ^ b).bit_count() for a, b in zip(data, changed, strict=True))
        assert bits == 1
    assert flipped(b"", {}) == b""


def test_a_killed_process_leaves_its_record(tmp_path: Path) -> None:
    code = (
        "import sys; from podembed.workers.faults.inject import *\n"
        "plan = FaultPlan(folder=sys.argv[1], faults=(Fault(point='step.update', action='kill'),))\n"
        "FaultPoints.of(plan, 'host 0').hit('step.update', step=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert [record.point for record in read_records(str(tmp_path))] == ["step.update"]
