"""Jobs under the names by which earlier versions recorded them, and a user's own package with one of these names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.jobs.criteo import COLUMN_NAMES
from podembed.orchestrator.commit.run_record import RUN_FILE, read_run
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.reference import JobReference, _LastFolder
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import seal, unseal

OWN_JOB = """
from podembed import JobConfig
from podembed.jobs.chaos.jobs import tiny
import dataclasses


def NAME(*, folder: str) -> JobConfig:
    return dataclasses.replace(tiny(folder=folder), name="of-the-user")
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that finds no folder `jobs`, as where the program is installed: that of the checkout is no user's."""
    root = Path(__file__).parents[3]
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != root])
    finders, modules = list(sys.meta_path), dict(sys.modules)
    # Folders of jobs that earlier tests of this process resolved; that of the checkout may be one of them.
    sys.meta_path[:] = [finder for finder in finders if not isinstance(finder, _LastFolder)]
    for name in [name for name in modules if name == "jobs" or name.startswith("jobs.")]:
        del sys.modules[name]
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules.keys():
        del sys.modules[name]


def own_package(folder: Path, *modules: str, first: str = "") -> str:
    """A user's package `jobs`, with a function in each module that has the module's last name."""
    for module in modules:
        path = folder.joinpath("jobs", *module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(OWN_JOB.replace("NAME", module.rpartition(".")[2]))
    (folder / "jobs" / "__init__.py").write_text(first)
    return str(folder)


def resolved(function: str, data: str, folder: str = "") -> JobConfig:
    return JobReference(function=function, arguments={"folder": data}, folder=folder).resolve()


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    numbers, fields = COLUMN_NAMES["podembed"]
    columns = {name: np.arange(64) for name in ("label", *numbers, *fields)}
    pq.write_table(pa.table({**columns, "label": np.arange(64) % 2}), tmp_path / "day.parquet")
    arguments = {"data": [str(tmp_path / "day.parquet")], "vocabulary_size": 100, "batch_size": 16}
    reference = JobReference(function="podembed.jobs.criteo:criteo", arguments=arguments)
    url = f"{tmp_path}/run"
    created = create_run(url, reference.resolve(), reference)
    record = tmp_path / "run" / RUN_FILE
    document = {name: value for name, value in unseal(RUN_FILE, record.read_bytes()).items() if name != "sha256"}
    record.write_bytes(seal({**document, "job_function": "jobs.criteo:criteo"}))
    assert read_run(Store(url)).job_function == "jobs.criteo:criteo"

    found = open_run(url, job_folder=str(tmp_path))
    assert (found.job.name, found.total_steps) == (created.job.name, created.total_steps)
    # As `train --resume` does, with the name of today.
    again = create_run(url, reference.resolve(), reference)
    assert again.record.run_id == created.record.run_id


def test_a_job_of_chaos_is_found_where_it_lies_now(tmp_path: Path) -> None:
    assert resolved("jobs.chaos_job:tiny", str(tmp_path)).name == "tiny"


def test_a_module_of_the_users_own_package_keeps_its_meaning(tmp_path: Path) -> None:
    folder = own_package(tmp_path / "project", "criteo")
    found = JobReference(function="jobs.criteo:criteo", arguments={"folder": str(tmp_path / "d")}, folder=folder)
    assert found.resolve().name == "of-the-user"


def test_beside_a_package_of_the_user_that_does_not_have_it_the_recorded_job_is_ours(tmp_path: Path) -> None:
    folder = own_package(tmp_path / "project", "mine")
    assert resolved("jobs.mine:mine", str(tmp_path / "d"), folder).name == "of-the-user"
    assert resolved("jobs.chaos_job:tiny", str(tmp_path / "d"), folder).name == "tiny"


def test_a_package_within_the_users_package_is_found(tmp_path: Path) -> None:
    folder = own_package(tmp_path / "project", "ads.clicks")
    (tmp_path / "project" / "jobs" / "ads" / "__init__.py").touch()
    assert resolved("jobs.ads.clicks:clicks", str(tmp_path / "d"), folder).name == "of-the-user"


def test_a_package_of_the_user_that_cannot_be_imported_is_not_replaced_by_ours(tmp_path: Path) -> None:
    folder = own_package(tmp_path / "project", "criteo", first="import not_installed_here\n")
    with pytest.raises(JobError, match=r"jobs/__init__\.py, line 1: No module named 'not_installed_here'"):
        JobReference(function="jobs.criteo:criteo", arguments={"data": ["x.parquet"]}, folder=folder).resolve()


def test_a_job_that_nobody_has_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("jobs.nothing:job", "jobs.no.such:job"):
        with pytest.raises(JobError, match=rf"Found job '{name}', which cannot be imported"):
            resolved(name, str(tmp_path))
