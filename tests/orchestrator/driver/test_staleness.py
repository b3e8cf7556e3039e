"""Whole runs with staleness 1: the losses that plain JAX finds from the definition, and the same bytes after an end, a
stop or a kill.
"""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.api.result import Result
from podembed.orchestrator.commit.run_record import read_run
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.orchestrator.driver.test_equality import COMMIT_EVERY, Killer, PlainJax, expected_audit, train_small
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import small_job

NUM_STEPS = 14
KINDS = ("HostActor", "DeviceActor")


# Rows of the audit count visits: on devices, and where hosts update them a step later.
PLACES = [
    {"a": "replicated", "b": "sharded"},
    {"bags": "sharded", "audit": "sharded"},
    {"a": "sharded", "b": "sharded", "bags": "replicated", "audit": "sharded"},
]


def stale_run(small_data: str, runs: Path, name: str, **options) -> Result:
    return train_small(
        small_data, runs, name, **({"num_hosts": 1, "in_process": True, "max_steps": NUM_STEPS} | options), staleness=1
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one_host(small_data: str, runs: Path) -> Result:
    return stale_run(small_data, runs, "one")


def test_each_loss_is_that_of_a_lookup_without_the_newest_update(one_host: Result, small_data: str) -> None:
    assert_plain(one_host, small_job(folder=small_data, staleness=1))


def assert_plain(found: Result, job: JobConfig) -> None:
    """Losses and rows are those of plain JAX."""
    index = build_index(job.resolved_data)
    plan = training_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed)
    reader = InputReader(job.resolved_data, index, plan, range(job.num_lanes))
    plain, losses = PlainJax(job), []
    for step in range(NUM_STEPS):
        losses.append(plain.step(reader.read(step)))
        if (step + 1) % COMMIT_EVERY == 0:
            plain.drain()
    plain.drain()
    np.testing.assert_allclose([found.losses[step] for step in range(NUM_STEPS)], losses, rtol=1e-5)
    state = committed_state(found.path)
    for spec, table in zip(plain.specs, plain.tables, strict=True):
        if spec.name != "audit":  # its gradient is defined by hand
            np.testing.assert_allclose(state[f"{spec.name}/rows"], table, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_tables_on_devices_are_never_stale_beside_those_on_hosts(
    places: dict[str, str], small_data: str, runs: Path
) -> None:
    """The same lookups and updates as in plain JAX, and each sample is there once."""
    found = stale_run(small_data, runs, f"mixed{PLACES.index(places)}", places=places)
    assert {table.name: table.is_on_devices for table in found.tables} == {
        name: name in places for name in ("a", "b", "bags", "audit")
    }
    job = small_job(folder=small_data, staleness=1, places=places)
    assert_plain(found, job)
    audit = committed_state(found.path)["audit/rows"][:, 0]
    np.testing.assert_allclose(audit, expected_audit(job, NUM_STEPS), atol=1e-4)
    stale_run(small_data, runs, f"cut{PLACES.index(places)}", max_steps=COMMIT_EVERY, places=places)
    cut = stale_run(small_data, runs, f"cut{PLACES.index(places)}", places=places)
    assert_same_bytes(committed_state(cut.path), committed_state(found.path))


def test_it_is_recorded_and_told(one_host: Result) -> None:
    assert read_run(Store(one_host.path)).staleness == 1
    assert one_host.staleness == 1


def test_ending_at_a_commit_and_going_on_changes_no_byte(one_host: Result, small_data: str, runs: Path) -> None:
    stale_run(small_data, runs, "resumed", max_steps=COMMIT_EVERY)
    resumed = stale_run(small_data, runs, "resumed")
    assert_same_bytes(committed_state(resumed.path), committed_state(one_host.path))


class Stopper(SilentReporter):
    """Asks the run to stop, as Ctrl-C does, after the first window, whose next step is looked up by then."""

    def window(self, report: WindowReport) -> None:
        if report.step == 1:
            signal.raise_signal(signal.SIGINT)


def test_a_stop_is_a_commit_like_any_other(small_data: str, runs: Path) -> None:
    stopped = stale_run(small_data, runs, "stopped", reporter=Stopper())
    assert (stopped.stopped_by, stopped.step) == ("SIGINT", 1)
    ended = stale_run(small_data, runs, "ended", max_steps=1)
    assert_same_bytes(committed_state(stopped.path), committed_state(ended.path))
    after_stop, after_end = (stale_run(small_data, runs, name) for name in ("stopped", "ended"))
    assert_same_bytes(committed_state(after_stop.path), committed_state(after_end.path))


@is_long
@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "victim", "places"), [("two", "HostActor", {}), *(("mixed", kind, PLACES[0]) for kind in KINDS)]
)
def test_a_killed_run_ends_with_the_same_bytes(
    name: str, victim: str, places: dict[str, str], ray_cluster: None, small_data: str, runs: Path
) -> None:
    hosts = {"num_hosts": 2, "in_process": False, "max_steps": 50, "places": places}
    name = f"{name}-{victim}"
    undisturbed = stale_run(small_data, runs, name, **hosts)
    killer = Killer(victim, after_step=COMMIT_EVERY, seed=1)
    killed = stale_run(small_data, runs, f"{name}-killed", **hosts, reporter=killer)
    assert killer.killed
    assert len(killed.recoveries) == 1
    assert killed.losses == undisturbed.losses
    assert_same_bytes(committed_state(killed.path), committed_state(undisturbed.path))
