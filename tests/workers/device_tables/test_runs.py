"""Runs with tables on devices beside the same runs with all tables on hosts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from podembed.orchestrator.api.config import CheckpointConfig, WarmStart
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.serving.artifact.export_model import export_model
from podembed.serving.artifact.exported_model import load
from podembed.serving.predict.evaluate import evaluate
from podembed.serving.predict.predict import predict
from podembed.tools.metrics.reading import StreamReader
from podembed.workers.host import tables_on_devices
from podembed.workers.storage.store import Store
from tests.long_tests import is_long, long_case
from tests.processes import actor_processes
from tests.run_state import committed_state
from tests.workers.device_tables.jobs import SIZES, assert_close, train, wide_job, write_rows
from tests.workers.device_tables.test_norms import (
    assert_said_of_all_rows,
    assert_the_same_is_said,
    sample_each_window,
)


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
    found = train(folder, tmp_path, "run", on_devices=on_devices)
    assert_close(found, on_hosts)
    assert {table.name: (table.is_on_devices, table.sent_bytes, table.step_s > 0) for table in found.tables} == {
        name: (name in on_devices, 0.0, name not in on_devices) for name in SIZES
    }
    if len(on_devices) == len(SIZES):
        assert_served(found, folder, tmp_path)


def assert_served(found: Result, folder: Path, scratch: Path) -> None:
    """A commit is predicted and exported with the tables of the devices: the same scores to the last bit."""
    rows = str(folder / "rows.parquet")
    assert evaluate(found.path).evaluation.loss == pytest.approx(found.evaluations[-1].loss, rel=1e-6)
    predict(found.path, data=(rows,), out=str(scratch / "scores.parquet"))
    export_model(found.path, out=str(scratch / "model"))
    columns = pq.read_table(rows).drop_columns(["label", "shares"]).to_pydict()
    scores = pq.read_table(scratch / "scores.parquet")["score"].to_numpy()
    assert np.ptp(scores) > 0.1
    np.testing.assert_array_equal(load(str(scratch / "model")).predict(columns), scores)


def test_a_run_moves_a_table_when_it_resumes(folder: Path, tmp_path: Path, on_hosts: Result) -> None:
    """From hosts to devices, from whole copies to parts, and back. Losses and rows are those of a run that never moved
    one.
    """
    first = train(folder, tmp_path, "run", max_steps=10, on_devices=["few"])
    second = train(folder, tmp_path, "run", max_steps=15, on_devices=["many"], sharded=["few", "cut"])
    third = train(folder, tmp_path, "run", on_devices=[])
    assert [first.step, second.step, third.step] == [10, 15, 20]
    assert_close(third, on_hosts)
    found = first.losses | second.losses | third.losses
    assert found == pytest.approx(on_hosts.losses, rel=2e-5)


@pytest.mark.ray
def test_two_hosts_hold_the_same_tables_on_their_devices(
    folder: Path, tmp_path: Path, on_hosts: Result, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each owns a part of the buckets, and each of their four devices has a part of two tables. Norms are those of all
    rows. A later attempt with one host has all, and moves tables to that host and to whole copies.
    """
    sample_each_window(monkeypatch)
    placed = {"on_devices": ["few"], "sharded": ["many", "cut"]}
    # Hosts look at their rows in the fourth window. Commits end one at 5, 10 and 15.
    first = train(folder, tmp_path, "run", num_hosts=2, devices_per_host=2, max_steps=15, **placed)
    assert first.losses == pytest.approx({step: on_hosts.losses[step] for step in range(15)}, rel=2e-5)
    assert_said_of_all_rows(first.path, folder, tmp_path)
    windows = StreamReader(Store(first.path)).read().windows
    assert {point.value("exchange_rounds") for point in windows if point.first_step < point.step} == {1}
    assert_close(train(folder, tmp_path, "run", on_devices=["cut"], sharded=["few"]), on_hosts)


# In make test, test_updates.py has each rule on devices, and test_tpu_embedding_sharded.py lookups of all kinds.
@is_long
@pytest.mark.parametrize("place", ["sharded", "device"])
def test_all_that_a_table_may_be_is_the_same_on_devices(
    place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Combiners, weights, each rule, limits, rates that change, rounded lookups, sequences, and rows that are read. So
    are the norms of all rows that are trained.
    """
    sample_each_window(monkeypatch, often=True)
    trained = {table.name for table in wide_job(str(folder)).tables} - {"read"}
    expected = train(folder, tmp_path, "hosts", job="wide_job")
    found = train(folder, tmp_path, place, job="wide_job", place=place)
    assert_close(found, expected)
    assert_the_same_is_said(found.path, expected.path, tables=trained)


@pytest.mark.parametrize("place", ["sharded", long_case("on_devices")])
def test_deltas_hold_the_rows_that_changed(
    place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others, as those of a run with all tables on hosts. Rows are given and taken in several messages."""
    monkeypatch.setattr(tables_on_devices, "ROW_BYTES", 20_000)
    often = CheckpointConfig(every_steps=5, full_every=10)
    placed: dict[str, dict[str, Any]] = {"hosts": {}, "devices": {place: [*SIZES]}}
    runs = {name: train(folder, tmp_path, name, checkpoints=often, **tables) for name, tables in placed.items()}
    found = {name: named_rows(run) for name, run in runs.items()}
    assert len(found["hosts"]) == 3 * len(SIZES)
    assert found["hosts"] == found["devices"]
    # In a run of 20 steps most rows of the largest table stay as they were.
    assert all(0 < count < SIZES["cut"] // 2 for (_, table), count in found["hosts"].items() if table == "cut")
    assert_served(runs["devices"], folder, tmp_path)


def test_a_run_begins_from_one_whose_tables_lie_elsewhere(folder: Path, tmp_path: Path, on_hosts: Result) -> None:
    """From hosts to parts, and from parts to hosts: as from hosts to hosts."""
    sharded = train(folder, tmp_path, "sharded", sharded=[*SIZES])
    expected = train(folder, tmp_path, "begun", max_steps=5, warm_start=WarmStart(source=on_hosts.path))
    assert expected.losses[0] < on_hosts.losses[0]
    there = train(folder, tmp_path, "there", max_steps=5, warm_start=WarmStart(source=on_hosts.path), sharded=[*SIZES])
    back = train(folder, tmp_path, "back", max_steps=5, warm_start=WarmStart(source=sharded.path))
    for found in (there, back):
        assert_close(found, expected)


def named_rows(run: Result) -> dict[tuple[str, str], int]:
    """By commit and table, how many rows its delta names."""
    found: dict[tuple[str, str], int] = {}
    for ids in Path(run.path).glob("data/*/tables/*/delta-*/ids"):
        commit, _, table = ids.parts[-5:-2]
        count = json.loads((ids / "zarr.json").read_text())["shape"][0]
        found[commit, table] = found.get((commit, table), 0) + count
    return found


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
def test_numbers_of_hosts_change_with_the_bytes_of_a_run_without_a_loss(
    folder: Path, tmp_path: Path, on_hosts: Result, ray_cluster: None
) -> None:
    """Two hosts, one, and two again, with one table on hosts. A host is killed on the way."""
    killer = Killer("HostActor")
    disturbed = chain(folder, tmp_path, "disturbed", killer)
    assert len(killer.killed) == len(killer.recoveries) == 1
    assert_close(disturbed, on_hosts)
    arrays = committed_state(disturbed.path)
    for name, values in committed_state(chain(folder, tmp_path, "alone", SilentReporter()).path).items():
        np.testing.assert_array_equal(arrays[name], values, err_msg=name)


def chain(folder: Path, storage: Path, name: str, reporter: SilentReporter) -> Result:
    """A run whose parts have other numbers of hosts; the first part has the reporter."""
    placed: dict[str, Any] = {"on_devices": ["few", "many"]}
    train(folder, storage, name, num_hosts=2, max_steps=15, reporter=reporter, **placed)
    train(folder, storage, name, max_steps=18, **placed)
    return train(folder, storage, name, num_hosts=2, **placed)


@pytest.mark.ray
@is_long
@pytest.mark.parametrize(
    ("kind", "place", "devices"),
    [
        ("HostActor", "replicated", {"devices_per_host": 2}),
        ("DeviceActor", "replicated", {"mesh": {"data": 1, "model": 2}}),
        ("DeviceActor", "replicated", {"mesh": {"data": 2, "model": 2}}),
        ("HostActor", "sharded", {"devices_per_host": 4}),
        ("DeviceActor", "sharded", {"mesh": {"data": 1, "model": 2}}),
        ("DeviceActor", "sharded", {"mesh": {"data": 2, "model": 2}}),
    ],
)
def test_after_a_loss_devices_have_the_rows_of_the_last_commit(
    folder: Path, tmp_path: Path, ray_cluster: None, kind: str, place: str, devices: dict[str, Any]
) -> None:
    """On two hosts with two or four devices each, of which two may share samples and cut the model."""
    expected, killer = train(folder, tmp_path, "hosts", job="wide_job"), Killer(kind)
    placed = {"job": "wide_job", "place": place, "num_hosts": 2, **devices}
    found = train(folder, tmp_path, "devices", reporter=killer, **placed)
    assert len(killer.killed) == len(killer.recoveries) == 1
    assert_close(found, expected)
