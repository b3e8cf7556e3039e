"""Traces of whole runs in this process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax
import pytest

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import (
    CheckpointConfig,
    ConfigurationError,
    MetricsConfig,
    RunConfig,
    ScalingConfig,
)
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.events.tracing import TraceCut, TraceLost, TraceWritten
from podembed.workers.device.measures.jax_profile import JaxProfile
from podembed.workers.job.reference import JobReference
from podembed.workers.liveness.progress import Phase
from podembed.workers.tracing.recorder import Recorder
from tests.run_state import assert_same_bytes, committed_state
from tests.tools.tracing.reading import read_trace

NUM_STEPS = 12


class Heard(SilentReporter):
    """Keeps what is said of traces."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        if isinstance(event, TraceCut | TraceLost | TraceWritten):
            self.events.append(event)


def trained(folder: str, where: Path, trace: str | None, *, max_steps: int = NUM_STEPS) -> tuple[Result, list[Event]]:
    heard = Heard()
    trainer = Trainer(
        JobReference(function="tests.small_job:small_job", arguments={"folder": folder}),
        scaling_config=ScalingConfig(in_process=True, threads_per_host=1),
        run_config=RunConfig(
            name="run",
            storage_path=str(where),
            max_steps=max_steps,
            checkpoint_config=CheckpointConfig(every_steps=7),
            metrics_config=MetricsConfig(trace=trace),
        ),
        reporter=heard,
    )
    return trainer.fit(), heard.events


@pytest.fixture(scope="module")
def plain(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(small_data, tmp_path_factory.mktemp("plain"), None)[0]


def test_a_trace_shows_its_steps_and_changes_none(plain: Result, small_data: str, tmp_path: Path) -> None:
    result, events = trained(small_data, tmp_path, "5:9+jax")
    assert result.losses == plain.losses
    assert_same_bytes(committed_state(result.path), committed_state(plain.path))
    assert not [*Path(plain.path).glob("traces")]

    (written,) = events
    assert isinstance(written, TraceWritten)
    assert Path(written.location) == Path(result.path) / "traces" / "steps-5-9-generation-1.pftrace"
    assert (written.first_step, written.last_step, written.missing, written.fault) == (5, 9, (), "")
    processes = read_trace(Path(written.location).read_bytes())
    assert [*processes] == ["driver", "host 0", "device 0"]
    # The threads of one process have one clock.
    assert all(abs(clock.offset_s) <= clock.uncertainty_s < 1.0 for clock in written.clocks)
    assert processes["host 0"].facts["clock, uncertain by ms"] == written.clocks[0].uncertainty_s * 1e3

    steps = [f"step {number}" for number in range(5, 9)]
    host, device, driver = processes["host 0"], processes["device 0"], processes["driver"]
    assert [one.name for one in host.tracks["work"] if one.name.startswith("step ")] == steps
    phases = [one for one in host.tracks["work"] if one.parent in steps]
    assert {one.name for one in phases} >= {Phase.READ, Phase.DEDUP, Phase.GATHER, Phase.DEVICE, Phase.UPDATE}
    words = {phase.value for phase in Phase}
    assert {one.name for one in host.tracks["work"]} <= {*steps, *words}
    assert {one.parent for one in phases if one.name == Phase.DEVICE} == {*steps}
    assert [one.name for one in device.tracks["work"] if one.name.startswith("device step")] == [
        f"device {step}" for step in steps
    ]
    assert written.without_jax == ()
    operations = [
        one
        for track, slices in device.tracks.items()
        if track.startswith("JAX ")
        for one in slices
        if "hlo_op" in one.values
    ]
    # Each operation of the compiled step once, and on the common clock. Norms that are not measured in each step may
    # have others in some.
    found = Counter(one.values["hlo_op"] for one in operations if one.values["hlo_module"] == "jit_train")
    assert len(found) > 10
    assert {4} <= {*found.values()} <= {1, 3, 4}
    middles = [(one.began_ns + one.ended_ns) / 2 for one in operations]
    for step in steps:
        (around,) = device.named(f"device {step}")
        assert sum(around.began_ns <= middle <= around.ended_ns for middle in middles) >= len(operations) // 5
    # The commit of step 7 begins between two windows.
    (first,), (second,) = driver.named("steps 5:7"), driver.named("steps 7:9")
    (commit,) = driver.named("begin commit")
    assert first.ended_ns <= commit.began_ns <= commit.ended_ns <= second.began_ns
    for one in [*phases, *device.named("device step 6")]:
        assert first.began_ns - 10**6 <= one.began_ns <= one.ended_ns <= second.ended_ns + 10**6
    assert "train" in {one.name for one in driver.tracks["calls to host 0"]}
    assert driver.named("commit of step 7")
    # The first batches may have been read before the trace began.
    assert {one.name for one in host.tracks["input"]} & {f"read step {number}" for number in range(5, 14)}
    assert host.tracks["save"][0].name == device.tracks["save"][0].name == "write s000000007-g00000001"
    assert written.num_spans == sum(len(track) for one in processes.values() for track in one.tracks.values())


def test_a_job_that_profiles_itself_keeps_its_profile(tmp_path: Path) -> None:
    recorder = Recorder()
    profile = JaxProfile(recorder)
    jax.profiler.start_trace(tmp_path)
    profile.begin()
    spans, num_dropped, reason = profile.end()
    jax.profiler.stop_trace()
    assert (spans, num_dropped) == ([], 0)
    assert "Only one profile may be run at a time" in reason
    assert [*tmp_path.rglob("*.xplane.pb")]
    # What was asked before and did not begin is forgotten.
    profile.begin()
    jax.numpy.ones(3).block_until_ready()
    assert profile.end()[2] == ""


def test_what_is_said_of_a_trace_that_cannot_be(small_data: str, tmp_path: Path) -> None:
    _, events = trained(small_data, tmp_path, "12:15")
    assert events == [TraceLost(asked="12:15", reason="the run has 12 steps")]
    # A resumed run traces what it still trains, although the folder cannot be written.
    (tmp_path / "run" / "traces").write_bytes(b"a file where a folder should be")
    result, events = trained(small_data, tmp_path, "10:20", max_steps=16)
    cut, lost = events
    assert cut == TraceCut(
        asked="10:20",
        first_step=12,
        last_step=16,
        reason="training goes on from step 12, and the run has 16 steps",
    )
    assert isinstance(lost, TraceLost)
    assert "traces" in lost.reason
    assert result.step == 16
    (tmp_path / "run" / "traces").unlink()
    _, events = trained(small_data, tmp_path, "3:9", max_steps=20)
    assert events == [TraceLost(asked="3:9", reason="training goes on from step 16")]


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ("25:20", "Found trace='25:20', which holds no step. Expected a first step below"),
        ("20:20", "Found trace='20:20', which holds no step"),
        ("x", "Found trace='x'. Expected two steps, FIRST:LAST"),
        ("-1:5", "Found trace='-1:5'. Expected two steps"),
        ("5:9+gpu", "20:25.jax adds JAX's own profile"),
        ("5", "20:25 traces the five steps 20, 21, 22, 23 and 24"),
        ("", "Found trace=''. Expected two steps"),
    ],
)
def test_what_is_no_range_of_steps_is_refused(trace: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        MetricsConfig(trace=trace)
