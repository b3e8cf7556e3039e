"""What lies in the current folder is not run: no command takes a module from there, but the one of a job that is found
nowhere else.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from podembed.jobs.search_path import COMMAND, new_process, without_folder
from tests.click_logs import click_lines
from tests.long_tests import long_case

OWN = {"podembed", "tests", "benchmarks"}
# A user's own modules may have the names of our folders.
OURS_BEFORE = {"embedding", "workers", "orchestrator", "serving", "tools", "jobs"}
# Its array of JAX is there before there are steps, which must not keep hosts from joining each other.
MY_JOB = """
from dataclasses import replace

import jax.numpy as jnp

from podembed.jobs.chaos.jobs import TinyModel, tiny
from podembed.workers.job.job import JobConfig


ONE = jnp.ones(())


class MyModel(TinyModel):
    def apply(self, params, dense, activations):
        return ONE * super().apply(params, dense, activations)


def job(*, folder: str) -> JobConfig:
    return replace(tiny(folder=folder), model=MyModel())
"""


class Planted:
    """A folder with a file for every module that Python and the installed packages have, each of which tells when it is
    run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told = folder.parent / f"{folder.name}-told"
        folder.mkdir()
        names = (set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions()) | OURS_BEFORE) - OWN
        for name in filter(str.isidentifier, names):
            tell = f"open({str(self._told)!r}, 'a').write('{name} for ' + str(sys.orig_argv) + '\\n')"
            (folder / f"{name}.py").write_text(f"import sys\n{tell}\nraise ImportError('{name} was planted')\n")

    @property
    def told(self) -> str:
        """Which files were run, and by which process."""
        return self._told.read_text() if self._told.exists() else ""

    def command(
        self, program: Sequence[str], *arguments: str, environment: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Exit code and all words of a command that is given in the folder."""
        done = subprocess.run(
            [*program, *arguments],
            cwd=self.folder,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout


PODEMBED = (str(Path(sys.executable).with_name("podembed")),)
MODULE = (sys.executable, "-m", COMMAND)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, small_data: str) -> Planted:
    """The folder of a run, as one that somebody was sent, and in it what was planted."""
    found = Planted(tmp_path_factory.mktemp("sent") / "run")
    (found.folder / "my_job.py").write_text(MY_JOB)
    arguments = ["train", "--job", "my_job:job", "--set", f"folder={small_data}", "--in-process", "--max-steps", "4"]
    code, words = found.command(PODEMBED, *arguments, "--checkpoint-every", "2", "--storage", "..", "--name", "run")
    assert (code, found.told) == (0, ""), words
    return found


@pytest.mark.parametrize("program", [long_case(PODEMBED), MODULE])
def test_a_look_at_a_run_from_within_its_folder_runs_nothing_of_it(planted: Planted, program: tuple[str, ...]) -> None:
    code, words = planted.command(program, "fsck", ".")
    assert (code, planted.told) == (0, ""), words


@pytest.mark.parametrize(
    "arguments",
    [
        long_case(("inspect", ".")),
        long_case(("diff", ".", ".")),
        long_case(("extract", ".", "audit", "1")),
        long_case(("export", ".", "--table", "a", "--format", "parquet", "--out", "../exported")),
        long_case(("compact", ".")),
        long_case(("plan", ".", "--hosts", "2")),
        # The run of `planted` was trained there, and `supervise` starts a `resume`.
        long_case(("resume", ".", "--in-process", "--max-steps", "6")),
        ("supervise", "--", "resume", "../no-run"),
        long_case(("prune", ".", "--keep", "2")),
        long_case(("chaos", "--in-process", "--only", "F27")),
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_command_runs_what_lies_in_the_current_folder(planted: Planted, arguments: tuple[str, ...]) -> None:
    code, words = planted.command(PODEMBED, *arguments)
    assert planted.told == "", words
    # Refusals are of the command itself, not of a module that could not be imported.
    assert code in (0, 87), words
    assert "Traceback" not in words


def test_processes_of_a_preparation_run_nothing_of_the_current_folder(planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "clicks.tsv").write_bytes(b"\n".join(click_lines(50)) + b"\n")
    arguments = ["prepare", str(tmp_path / "clicks.tsv"), "--out", str(tmp_path / "out"), "--workers", "2"]
    code, words = planted.command(PODEMBED, *arguments)
    assert (code, planted.told) == (0, ""), words


@pytest.mark.ray
def test_workers_find_the_job_there_and_run_nothing_else(
    planted: Planted, small_data: str, ray_cluster: None, tmp_path: Path
) -> None:
    from podembed.orchestrator.cluster.connection import cluster_address

    arguments = ["train", "--job", "my_job:job", "--set", f"folder={small_data}", "--max-steps", "4"]
    arguments += ["--storage", str(tmp_path), "--name", "run", "--hosts", "2", "--threads-per-host", "1"]
    code, words = planted.command(PODEMBED, *arguments, environment={"RAY_ADDRESS": cluster_address()})
    assert (code, planted.told) == (0, ""), words
    assert "done at step 4 of 4" in words


def test_a_folder_is_taken_off_the_path_in_each_of_its_spellings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert without_folder(["", here, f"{here}/", ".", "/lib"], here, is_needed=False) == ["/lib"]
    assert without_folder([here, "/lib"], here, is_needed=True) == ["/lib", here]


def test_a_program_in_the_current_folder_comes_before_one_that_is_installed(tmp_path: Path) -> None:
    here, installed = tmp_path / "working_dir", tmp_path / "site-packages"
    for folder in (here, installed):
        (folder / "podembed").mkdir(parents=True)
        (folder / "podembed" / "__main__.py").touch()
    path = [str(here), "/lib", str(installed), "/more"]
    assert without_folder(path, str(here), is_needed=True) == ["/lib", str(here), str(installed), "/more"]
    assert without_folder(path, str(here), is_needed=False) == ["/lib", str(installed), "/more"]


def test_a_process_of_its_own_looks_in_the_current_folder_only_where_the_program_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new_process() == [sys.executable, "-P", "-m", COMMAND]
    monkeypatch.chdir(Path(__file__).parents[2])
    assert new_process() == [sys.executable, "-m", COMMAND]
