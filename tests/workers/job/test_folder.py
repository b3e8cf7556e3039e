"""The folder of a job's module: searched after everything else, packages without a file of their own included."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podembed.workers.job.job import JobError
from podembed.workers.job.reference import JobReference, search_last

JOB = "from podembed.workers.job.job import JobConfig\n\n\ndef job() -> JobConfig:\n    return 'found here'\n"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_module_of_the_folder_is_found_and_so_are_those_beside_it_and_in_its_packages(tmp_path: Path) -> None:
    (tmp_path / "one_jobs").mkdir()
    (tmp_path / "one_jobs" / "clicks.py").write_text("import beside_it\n" + JOB)
    (tmp_path / "beside_it.py").write_text("")
    reference = JobReference(function="one_jobs.clicks:job", folder=str(tmp_path))
    with pytest.raises(JobError, match="returned a str"):
        reference.resolve()
    assert str(tmp_path) not in sys.path
    with pytest.raises(JobError, match="cannot be imported"):
        JobReference(function="other_jobs.clicks:job", folder=str(tmp_path)).resolve()


def test_what_is_installed_comes_first_with_and_without_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "spread").mkdir()
    for name in ("spread", "colorsys"):
        (tmp_path / f"{name}.py").write_text(f"raise AssertionError('{name} of the job folder was run')\n")
    (tmp_path / "needs_both.py").write_text("import colorsys\nimport spread\n\n\n" + JOB)
    sys.path.append(str(tmp_path / "installed"))
    sys.modules.pop("colorsys", None)
    try:
        with pytest.raises(JobError, match="returned a str"):
            JobReference(function="needs_both:job", folder=str(tmp_path)).resolve()
        assert sys.modules["spread"].__file__ is None
    finally:
        sys.path.remove(str(tmp_path / "installed"))


def test_the_folder_is_not_searched_for_a_job_that_is_found_without_it(tmp_path: Path) -> None:
    (tmp_path / "not_to_be_found.py").write_text("")
    search_last(str(tmp_path), for_package="workers")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("not_to_be_found")
    search_last(str(tmp_path), for_package="not_to_be_found")
    search_last(str(tmp_path), for_package="not_to_be_found")
    assert importlib.import_module("not_to_be_found").__file__ == str(tmp_path / "not_to_be_found.py")
    assert sum(getattr(finder, "folder", None) == str(tmp_path) for finder in sys.meta_path) == 1


def test_a_function_that_is_not_in_its_module_is_told_from_a_module_that_is_not_there() -> None:
    missing = JobReference(function="tests.small_job:smal_job")
    with pytest.raises(
        JobError,
        match=r"Found no 'smal_job' in the module tests\.small_job \(.*It has small_job: pass tests\.small_job:",
    ):
        missing.resolve()
