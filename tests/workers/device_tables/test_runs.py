"""Runs with tables on devices beside the same runs with all tables on hosts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.reporter import SilentReporter
from tests.long_tests import is_long, long_case
from tests.processes import actor_processes
from tests.workers.device_tables.jobs import SIZES, assert_close, train, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder)
    return folder


@pytest.fixture(scope="module")
def on_hosts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """All tables on hosts."""
    return train(folder, tmp_path_factory.mktemp("hosts"), "run")


@pytest.mark.parametrize("on_devices", [long_case(["few"], id="few"), long_case(["many"], id="many"), list(SIZES)])
def test_tables_on_devices_train_as_those_on_hosts(
    folder: Path, tmp_path: Path, on_hosts: Result, on_devices: list[str]
) -> None:
    assert_close(train(folder, tmp_path, "run", on_devices=on_devices), on_hosts)


def test_a_run_moves_a_table_when_it_resumes(folder: Path, tmp_path: Path, on_hosts: Result) -> None:
    """From hosts to devices and back. Losses and rows are those of a run that never moved one."""
    first = train(folder, tmp_path, "run", max_steps=10, on_devices=["few"])
    second = train(folder, tmp_path, "run", max_steps=15, on_devices=["many", "cut"])
    third = train(folder, tmp_path, "run", on_devices=[])
    assert [first.step, second.step, third.step] == [10, 15, 20]
    assert_close(third, on_hosts)
    found = first.losses | second.losses | third.losses
    assert found == pytest.approx(on_hosts.losses, rel=2e-5)


@pytest.mark.ray
def test_two_hosts_hold_the_same_tables_on_their_devices(
    folder: Path, tmp_path: Path, on_hosts: Result, ray_cluster: None
) -> None:
    """Each owns a part of the buckets. A later attempt with one host has all, and moves a table to that host."""
    first = train(folder, tmp_path, "run", num_hosts=2, max_steps=10, on_devices=list(SIZES))
    assert first.losses == pytest.approx({step: on_hosts.losses[step] for step in range(10)}, rel=2e-5)
    assert_close(train(folder, tmp_path, "run", on_devices=["few", "cut"]), on_hosts)


def test_all_that_a_table_may_be_is_the_same_on_devices(folder: Path, tmp_path: Path) -> None:
    """Combiners, weights, each rule, limits, rates that change, rounded lookups, sequences, and rows that are read."""
    expected = train(folder, tmp_path, "hosts", job="wide_job")
    assert_close(train(folder, tmp_path, "devices", job="wide_job", on_devices=True), expected)


class Killer(SilentReporter):
    """Kills one actor of a kind after the first commit."""

    def __init__(self, kind: str) -> None:
        self.kind, self.has_commit = kind, False
        self.killed: list[int] = []
        self.recoveries: list[Any] = []

    def commit(self, *arguments: Any, **named: Any) -> None:
        self.has_commit = True

    def recovery(self, recovery: Any, *arguments: Any, **named: Any) -> None:
        self.recoveries.append(recovery)

    def window(self, report: Any, *arguments: Any, **named: Any) -> None:
        if self.has_commit and not self.killed:
            self.killed.append(actor_processes(self.kind)[0])
            os.kill(self.killed[0], signal.SIGKILL)


@pytest.mark.ray
@is_long
@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("HostActor", {"devices_per_host": 2}),
        ("DeviceActor", {"mesh": {"data": 1, "model": 2}}),
        ("DeviceActor", {"mesh": {"data": 2, "model": 2}}),
    ],
)
def test_after_a_loss_devices_have_the_rows_of_the_last_commit(
    folder: Path, tmp_path: Path, ray_cluster: None, kind: str, devices: dict[str, Any]
) -> None:
    """On two hosts with two or four devices each, of which two may share samples and cut the model."""
    expected, killer = train(folder, tmp_path, "hosts", job="wide_job"), Killer(kind)
    placed = {"job": "wide_job", "on_devices": True, "num_hosts": 2, **devices}
    found = train(folder, tmp_path, "devices", reporter=killer, **placed)
    assert len(killer.killed) == len(killer.recoveries) == 1
    assert_close(found, expected)
