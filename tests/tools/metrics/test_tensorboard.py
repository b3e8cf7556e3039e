"""Event files, read back by TensorBoard's own reader; and a program's own function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.metrics_config import MetricsConfig
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan, AlarmEnded
from podembed.orchestrator.events.run import GenerationLost, SinkFailed
from podembed.tools.metrics.catalog import CATALOG
from podembed.tools.metrics.point import Point
from podembed.tools.metrics.sinks import measuring
from podembed.tools.metrics.tensorboard import SUMMARY
from podembed.workers.storage.store import Store
from tests.tools.metrics.windows import recovery, window


def measured(tmp_path: Path, config: MetricsConfig, events: Sequence[Event]) -> list[Event]:
    emitted: list[Event] = []
    with measuring(config, Store(str(tmp_path / "run")), emitted.append) as emit:
        for event in events:
            emit(event)
    return emitted


def read_back(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_reads_steps_and_values(tmp_path: Path) -> None:
    folder = tmp_path / "board"
    config = MetricsConfig(tensorboard=str(folder))
    measured(tmp_path, config, [window(0, 10, loss=0.5), window(10, 20, loss=math.inf), window(20, 30, loss=0.25)])
    found = read_back(folder)
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(10, 0.5), (20, math.inf), (30, 0.25)]


def test_tags_sum_up_hosts_and_causes_unless_all_are_asked_for(tmp_path: Path) -> None:
    events = [
        window(0, 10, num_hosts=3),
        *(
            AlarmBegan(step=10, alarm=alarm, subject="", is_note=False, finding="", remedy="")
            for alarm in ("loss_rises", "overfits")
        ),
        AlarmEnded(step=10, alarm="loss_rises", subject=""),
        window(10, 20, num_hosts=3),
        GenerationLost(generation=1, cause="host 1 ended", workers=(), base_step=10, fault="host"),
        recovery(base_step=10, generation=2, discarded_steps=10),
        window(10, 30, generation=2, num_hosts=3),
    ]
    measured(tmp_path, MetricsConfig(tensorboard=str(tmp_path / "few")), events)
    few = read_back(tmp_path / "few")
    tags = few.Tags()["scalars"]
    assert {tag for tag in tags if "/" in tag} == {
        f"waited_ratio/{source}" for source in ("input", "device", "hosts", "storage")
    }
    assert few.Scalars("waited_ratio/input")[0].value == pytest.approx(0.1)
    assert [one.value for one in few.Scalars("memory_bytes")][-1] == 100
    assert few.Scalars("alarm")[-1].value == 1
    assert few.Scalars("lost_steps")[-1].value == 10
    assert {tag.split("/")[0] for tag in tags} <= set(SUMMARY) <= set(CATALOG)

    measured(tmp_path, MetricsConfig(tensorboard=str(tmp_path / "all"), tensorboard_all=True), events)
    every = set(read_back(tmp_path / "all").Tags()["scalars"])
    assert {"memory_bytes/0", "phase_seconds/1/id_exchange", "waited_ratio/2/hosts"} <= every
    assert "alarm/overfits/warning" in every


def test_tensorboard_drops_the_steps_that_a_fault_took_back(tmp_path: Path) -> None:
    folder = tmp_path / "board"
    events = [
        window(0, 10, loss=0.5),
        window(10, 20, loss=0.4),
        window(20, 30, loss=0.3),
        recovery(base_step=10, generation=2, discarded_steps=20),
        window(10, 25, generation=2, loss=0.35),
    ]
    measured(tmp_path, MetricsConfig(tensorboard=str(folder)), events)
    assert [one.step for one in read_back(folder).Scalars("loss")] == [10, 25]
    assert len(list(folder.iterdir())) == 2


def test_two_drivers_write_into_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "board"
    config = MetricsConfig(tensorboard=str(folder))
    measured(tmp_path, config, [window(0, 10)])
    measured(tmp_path, config, [window(10, 20, generation=2)])
    assert [one.step for one in read_back(folder).Scalars("loss")] == [10, 20]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "board").write_text("a file in the folder's place")
    emitted = measured(tmp_path, MetricsConfig(tensorboard=str(tmp_path / "board")), [window(0, 10), window(10, 20)])
    (failure,) = [event for event in emitted if isinstance(event, SinkFailed)]
    assert "FileExistsError" in failure.error
    assert str(tmp_path / "board") in failure.sink
    assert sum(event.kind == "window" for event in emitted) == 2


def test_a_function_gets_each_point_and_what_it_raises_is_told_once(tmp_path: Path) -> None:
    steps: list[int] = []

    def watch(point: Point) -> None:
        steps.append(point.step)
        raise LookupError("no such dashboard")

    emitted = measured(tmp_path, MetricsConfig(on_point=watch), [window(0, 10), window(10, 20)])
    assert steps == [10, 20]
    (failure,) = [event for event in emitted if isinstance(event, SinkFailed)]
    assert failure.error == "LookupError: no such dashboard"
    assert "watch" in failure.sink


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensorboard": ""}, "Expected a folder"),
        ({"tensorboard_all": True}, "Expected both"),
        ({"on_point": 3}, "Expected a function"),
        ({"port": 70_000}, "TCP"),
    ],
    ids=["folder", "all", "function", "port"],
)
def test_bad_settings_say_what_was_expected(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        MetricsConfig(**arguments)  # type: ignore[arg-type]


def test_ray_without_a_cluster_is_said_once(tmp_path: Path) -> None:
    emitted = measured(tmp_path, MetricsConfig(ray=True), [window(0, 10), window(10, 20)])
    (failure,) = [event for event in emitted if isinstance(event, SinkFailed)]
    assert "found no Ray cluster" in failure.error
    assert sum(event.kind == "window" for event in emitted) == 2
