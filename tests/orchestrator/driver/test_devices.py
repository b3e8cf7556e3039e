"""Whole runs on several devices a host, each in a program of its own: a program can divide its CPU only once. Runs on
one device are trained in the process of the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.orchestrator.api.config import CheckpointConfig, ScalingConfig
from podembed.orchestrator.api.result import Evaluation
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.reference import JobReference
from tests.long_tests import is_long
from tests.run_state import assert_same_bytes, committed_state
from tests.training import fit_job

ROOT = Path(__file__).parents[3]
PATIENCE_S = 900.0
NUM_STEPS, COMMIT_EVERY, KILLED_AT = 14, 4, 9
CUT = {"data": 2, "model": 2}

# Of some tables; the others are on hosts.
PLACES = {"a": "replicated", "b": "sharded"}


class Notes(SilentReporter):
    """Keeps what is said, and kills this program once it has got so far."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.has_commit = False
        self.notices: list[str] = []
        self.evaluations: list[float | None] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self.has_commit = True

    def evaluation(self, evaluation: Evaluation, **_: Any) -> None:
        self.evaluations.append(evaluation.loss)

    def window(self, report: WindowReport) -> None:
        if self.kill_at is not None and report.step >= self.kill_at and self.has_commit:
            os.kill(os.getpid(), signal.SIGKILL)


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    """The losses of a run and what it said."""
    notes = Notes(arguments.get("kill_at"))
    hosts = arguments.get("num_hosts", 1)
    result = fit_job(
        JobReference(
            function="tests.small_job:small_job",
            arguments={"folder": arguments["folder"], "evaluate": True, **arguments.get("job", {})},
        ),
        arguments["runs"],
        name=arguments["name"],
        scaling=ScalingConfig(
            num_hosts=hosts, threads_per_host=1, in_process=hosts == 1, **arguments.get("devices", {})
        ),
        max_steps=NUM_STEPS,
        eval_every_steps=6,
        checkpoint_config=CheckpointConfig(every_steps=COMMIT_EVERY),
        reporter=notes,
    )
    return {"losses": list(result.losses.values()), "notices": notes.notices, "evaluations": notes.evaluations}


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains, by a program of its own where that has several devices or is killed; returns what `train` does and
    `state`, what it committed.
    """
    runs = tmp_path_factory.mktemp("runs")

    def trained(name: str, **arguments: Any) -> dict[str, Any]:
        given = {"folder": small_data, "runs": str(runs), "name": name, **arguments}
        if not {"devices", "kill_at", "num_hosts"} & arguments.keys():
            return train(given) | {"state": committed_state(str(runs / name))}
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.orchestrator.driver.test_devices", json.dumps(given)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=PATIENCE_S,
        )
        if arguments.get("kill_at"):
            assert done.returncode == -signal.SIGKILL, done.stderr
            return {}
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]) | {"state": committed_state(str(runs / name))}

    return trained


def assert_near(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same training up to the order of sums."""
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-5)
    np.testing.assert_allclose(one["evaluations"], other["evaluations"], rtol=1e-5)
    for name, values in one["state"].items():
        np.testing.assert_allclose(values, other["state"][name], rtol=1e-3, atol=2e-5, err_msg=name)


# In make test, test_meshes.py has steps on such meshes, and two hosts of two devices each train in test_runs.py.
@is_long
def test_a_host_of_four_devices_trains_as_one_device(run: Run) -> None:
    """Its shares are padded: five devices would not divide them, and four parts of a mesh of two do."""
    alone, cut = run("alone"), run("cut", devices={"mesh": CUT})
    assert_near(cut, alone)
    assert "devices: 4 x cpu as data=2,model=2 for host 0" in cut["notices"]
    assert not [text for text in alone["notices"] if text.startswith("devices:")]


@is_long
@pytest.mark.parametrize(
    ("devices", "job"),
    [
        ({"devices_per_host": 4}, {}),
        ({"devices_per_host": 5}, {}),
        ({"devices_per_host": 8, "transfers": "packed"}, {}),
        ({"mesh": CUT, "transfers": "packed"}, {}),
        ({"mesh": {"data": 2, "model": 4}}, {}),
        ({"devices_per_host": 4, "transfers": "packed"}, {"staleness": 1}),
        ({"mesh": CUT}, {"staleness": 1}),
        ({"devices_per_host": 1, "transfers": "packed"}, {"staleness": 1}),
        ({"devices_per_host": 4, "transfers": "packed"}, {"staleness": 1, "places": PLACES}),
        ({"mesh": CUT}, {"staleness": 1, "places": PLACES}),
    ],
    ids=str,
)
def test_every_layout_trains_as_one_device_and_a_killed_run_ends_with_its_bytes(
    run: Run, request: pytest.FixtureRequest, devices: dict[str, Any], job: dict[str, Any]
) -> None:
    name = str(abs(hash(request.node.name)))
    alone, whole = run(f"{name}-alone", job=job), run(f"{name}-whole", devices=devices, job=job)
    assert_near(whole, alone)
    run(f"{name}-killed", devices=devices, job=job, kill_at=KILLED_AT)
    assert_same_bytes(run(f"{name}-killed", devices=devices, job=job)["state"], whole["state"])


@is_long
def test_a_run_goes_on_with_other_devices_and_other_hosts(run: Run) -> None:
    """Commits hold whole arrays."""
    alone = run("steady")
    run("moved", devices={"mesh": CUT}, kill_at=5)
    run("moved", devices={"devices_per_host": 8}, kill_at=KILLED_AT)
    after = run("moved", num_hosts=2, devices={"mesh": {"data": 1, "model": 2}})
    np.testing.assert_allclose(after["losses"], alone["losses"][-len(after["losses"]) :], rtol=1e-5)
    for name, values in after["state"].items():
        np.testing.assert_allclose(values, alone["state"][name], rtol=1e-3, atol=2e-5, err_msg=name)


@is_long
def test_two_hosts_of_four_devices_are_one_gang(run: Run) -> None:
    alone = run("one-host")
    for at, devices in enumerate(({"devices_per_host": 4}, {"mesh": CUT}, {"mesh": CUT, "transfers": "packed"})):
        assert_near(run(f"two-hosts-{at}", num_hosts=2, devices=devices), alone)


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))), flush=True)
