"""The ways in which a program reaches a Ray cluster, each beside folders of the user that have the names of ours.

The cluster's machine has all that podembed needs. The tests begin without podembed itself there, and the last one
installs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

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
