"""What workers are told of the driver's search path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from podembed.orchestrator.cluster import worker_path
from podembed.orchestrator.cluster.worker_path import DriverPath, driver_path, is_searched_first


def test_workers_are_told_of_folders_that_a_program_put_on_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "here", "last"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    library = os.path.dirname(os.__file__)
    archive = f"{library}.zip".replace("3.", "3")
    of_python = [archive, library, f"{library}/lib-dynload", *(path for path in sys.path if "site-packages" in path)]
    monkeypatch.setattr(sys, "path", ["../first", "", "gone", *of_python, str(tmp_path / "last"), "../first"])
    path = driver_path()
    assert path.before == (str(tmp_path / "first"), str(tmp_path / "here"))
    assert path.after == (str(tmp_path / "last"),)


@pytest.mark.parametrize("is_first", [True, False])
def test_workers_find_this_program_where_a_program_put_it_on_its_path(
    is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be told of any other folder before. Where it is installed they find it by themselves."""
    monkeypatch.setattr(worker_path, "_PROGRAM", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path] if is_first else [*sys.path, str(tmp_path)])
    sent = list(DriverPath()._get_proto_job_config().py_driver_sys_path)
    assert sent == ([str(tmp_path)] if is_first else [])


def test_workers_search_the_current_folder_first_only_where_the_driver_does(tmp_path: Path) -> None:
    library, here = os.path.dirname(os.__file__), str(tmp_path)
    assert is_searched_first(here, [here, library])
    assert not is_searched_first(here, [library, here])
    assert not is_searched_first(here, [library])
