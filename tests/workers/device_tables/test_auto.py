"""Runs whose tables have place='auto': on hosts where devices are CPUs, and where they lie once they were chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podembed.embedding.device_places import DeviceRoom
from podembed.jobs.fitting import fit, placed
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.events.run import PlacesChosen
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.workers.device.room import room_here
from podembed.workers.job.reference import JobReference
from tests.run_state import committed_state
from tests.workers.device_tables.jobs import SIZES, assert_close, placed_job, train, write_rows


class Listener(SilentReporter):
    """Keeps what was said of places."""

    def __init__(self) -> None:
        self.chosen: list[PlacesChosen] = []

    def event(self, event: Event) -> None:
        if isinstance(event, PlacesChosen):
            self.chosen.append(event)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder)
    return folder


def test_on_cpus_a_run_is_that_of_tables_on_hosts(folder: Path, tmp_path: Path) -> None:
    assert room_here() == "devices are CPUs"
    listener = Listener()
    found = train(folder, tmp_path, "auto", auto=[*SIZES], reporter=listener)
    expected = train(folder, tmp_path, "hosts")
    assert found.losses == expected.losses
    (event,) = listener.chosen
    assert [(one.table, one.place) for one in event.tables] == [(name, "host") for name in SIZES]
    assert event.sentence().startswith("places of tables: few on hosts (place='auto', and devices are CPUs); ")


def start(folder: Path, storage: Path, room: DeviceRoom | str, *, max_steps: int, **scaling: Any) -> Result:
    """A start of the run whose driver knows such devices."""
    reference = JobReference(
        function=f"{placed_job.__module__}:placed_job", arguments={"folder": str(folder), "auto": [*SIZES]}
    )
    url = f"{storage}/run"
    run = open_run(url) if Path(url).exists() else create_run(url, reference.resolve(), reference)
    said: list[Event] = []
    run = placed(run, lambda: room, emit=said.append)
    assert len(said) == 1
    config = RunConfig(
        storage_path=str(storage),
        name="run",
        max_steps=max_steps,
        eval_every_steps=10,
        checkpoint_config=CheckpointConfig(every_steps=5),
    )
    return fit(run, scaling=ScalingConfig(threads_per_host=1, **scaling), config=config, reporter=SilentReporter())


@pytest.mark.ray
def test_each_start_lies_where_its_devices_have_room(folder: Path, tmp_path: Path, ray_cluster: None) -> None:
    """As many rows as the memory has room for go to devices; the files do not tell, so each start chooses again."""
    expected = train(folder, tmp_path, "hosts")
    # 64 columns are 257 bytes a row; with Adagrad's slot, 8 are 65, so the largest takes 650,000 bytes of each.
    small = DeviceRoom(kind="pretended", memory_bytes=1_000_000, num_parts=4)
    large = DeviceRoom(kind="pretended", memory_bytes=10_000_000, num_parts=4)
    found = start(folder, tmp_path, small, max_steps=8, num_hosts=2, devices_per_host=2)
    assert {table.name: table.is_on_devices for table in found.tables} == {"few": True, "many": True, "cut": False}
    found = start(folder, tmp_path, large, max_steps=14, num_hosts=2, devices_per_host=2)
    assert all(table.is_on_devices for table in found.tables)
    found = start(folder, tmp_path, "devices are CPUs", max_steps=20, num_hosts=2)
    assert not any(table.is_on_devices for table in found.tables)
    assert_close(found, expected)
    assert committed_state(found.path).keys() == committed_state(expected.path).keys()
