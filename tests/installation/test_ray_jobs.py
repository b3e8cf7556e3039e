"""Jobs of a Ray cluster: the ways in which a program reaches it, each beside folders of the user that have the names of
ours, and what `RayJobRunner` and such a job tell each other.

The cluster's machine has all that podembed needs. The tests begin without podembed itself there, and the last one of
the ways installs it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from podembed.jobs.supervise.ray_jobs import RayJobRunner
from tests.dashboard import cluster_for_jobs, ray_job
from tests.installation.builds import copy_checkout, environment, install
from tests.installation.project import NUM_STEPS, add_to_checkout, told, training, write_project
from tests.long_tests import is_long

pytestmark = [pytest.mark.ray, pytest.mark.slow]
END_S = 1200


@dataclass(frozen=True)
class Machine:
    """A cluster of one machine: the interpreter there, and the dashboard's address."""

    python: Path
    address: str


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    python = environment(tmp_path_factory.mktemp("machine") / "env")
    with cluster_for_jobs(python) as address:
        yield Machine(python, address)


def submit(machine: Machine, folder: Path, arguments: list[str], *options: str) -> str:
    """All words of `ray job submit` from a folder; the job must end well."""
    words = ("submit", "--address", machine.address, *options, "--working-dir", ".", "--", "python", "-m", "podembed")
    return ray_job(machine.python, *words, *arguments, folder=folder, hidden=("PYTHONPATH",), end_s=END_S)


def check(words: str, clicks: str, place: str) -> None:
    """The job was trained to its end, and both driver and worker ran the copy of the program that lies there."""
    assert f"done at step {NUM_STEPS} of {NUM_STEPS}" in words
    places = told(clicks)
    assert len(places) >= 2, places
    assert all(place in found for found in places.values()), places


def arguments(clicks: str, folder: Path) -> list[str]:
    return [*training(clicks, folder / "runs", "run"), "--threads-per-host", "1"]


@is_long
def test_from_a_checkout(machine: Machine, clicks: str, tmp_path: Path) -> None:
    checkout = add_to_checkout(copy_checkout(tmp_path / "checkout", with_links=True))
    check(submit(machine, checkout, arguments(clicks, tmp_path)), clicks, "/working_dir_files/")


def test_from_a_project_with_the_wheel_as_a_module(machine: Machine, wheel: Path, clicks: str, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    runtime = json.dumps({"py_modules": [str(wheel)]})
    words = submit(machine, project, arguments(clicks, tmp_path), "--runtime-env-json", runtime)
    check(words, clicks, "/py_modules_files/")


@is_long
def test_from_a_project_with_the_package_installed(machine: Machine, wheel: Path, clicks: str, tmp_path: Path) -> None:
    install(machine.python, wheel)
    project = write_project(tmp_path / "project")
    check(submit(machine, project, arguments(clicks, tmp_path)), clicks, f"{machine.python.parents[1]}/lib")


def runner_of(address: str, folder: Path, notices: list[str]) -> RayJobRunner:
    (folder / "podembed").mkdir(exist_ok=True)
    (folder / "podembed" / "__init__.py").touch()
    # What is submitted is `python -m podembed`; this one stands in for a training that takes its time.
    (folder / "podembed" / "__main__.py").write_text(
        "import signal, sys, time\n"
        "print('arguments', sys.argv[1:], flush=True)\n"
        "if sys.argv[1] == 'wait':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (print('told to stop', flush=True), sys.exit(85)))\n"
        "    time.sleep(120)\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    return RayJobRunner(
        address=address, working_dir=str(folder), name=f"test-{folder.name}", notice=notices.append, patience_s=30.0
    )


def await_end(runner: RayJobRunner) -> int:
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        if (code := runner.poll()) is not None:
            return code
        time.sleep(0.1)
    raise TimeoutError(f"The job did not end within {END_S} s.")


def test_codes_and_output_of_jobs_come_back(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notices: list[str] = []
    runner = runner_of(machine.address, tmp_path, notices)
    for attempt, code in enumerate((88, 0), 1):
        runner.start(["train", str(code), "a b"], attempt)
        assert await_end(runner) == code
    printed = capsys.readouterr().out
    assert "arguments ['train', '88', 'a b']" in printed
    assert "arguments ['train', '0', 'a b']" in printed
    # On a busy machine there is also one that the cluster is waited for.
    submitted = [notice.split(":")[0] for notice in notices if notice.startswith("submitted ")]
    assert submitted == [f"submitted test-{tmp_path.name}-a{at}" for at in (1, 2)]


def test_a_job_is_asked_to_stop_and_given_time(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = runner_of(machine.address, tmp_path, [])
    runner.start(["wait"], 1)
    printed, deadline = "", time.monotonic() + END_S
    while "arguments" not in printed and time.monotonic() < deadline:
        assert runner.poll() is None
        printed += capsys.readouterr().out
        time.sleep(0.1)
    runner.stop()
    assert await_end(runner) != 0
    assert "told to stop" in capsys.readouterr().out
