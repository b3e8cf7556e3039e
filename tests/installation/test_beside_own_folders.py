"""Every form of the program works in a folder that has `jobs/`, `workers/`, `embedding.py` and `orchestrator.py` of its
own, and says which version it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.architecture.test_imports import ROOT
from tests.installation.builds import copy_checkout, environment, install
from tests.installation.project import add_to_checkout, write_project
from tests.long_tests import is_long, long_case

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def run(program: Sequence[str | Path], *arguments: str, folder: Path) -> str:
    """All words of a command that ends well."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*program, *arguments],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def plans(program: Sequence[str | Path], folder: Path, clicks: str) -> None:
    """The job is the user's, made with public names alone. Training it takes longer; Ray jobs do that."""
    words = run(program, "plan", "--job", "jobs.mine:job", "--set", f"folder={clicks}", folder=folder)
    assert "users" in words


def test_a_wheel(installed: Path, clicks: str, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    plans([installed.with_name("podembed")], project, clicks)
    assert run([installed, "-m", "podembed"], "--version", folder=project) == f"podembed {VERSION}\n"


@is_long
def test_a_wheel_by_the_other_name_of_each_command(installed: Path, clicks: str, tmp_path: Path) -> None:
    """`make test` plans with `-m` in a checkout."""
    project = write_project(tmp_path / "project")
    plans([installed, "-m", "podembed"], project, clicks)
    assert run([installed.with_name("podembed")], "--version", folder=project) == f"podembed {VERSION}\n"


@is_long
def test_an_editable_install(clicks: str, tmp_path: Path) -> None:
    """That of the environment in which all tests run."""
    project = write_project(tmp_path / "project")
    plans([Path(sys.executable).with_name("podembed")], project, clicks)
    words = run([sys.executable, "-m", "podembed"], "--version", folder=project)
    assert words == f"podembed {VERSION} (checkout {ROOT})\n"


# A checkout without links, and an editable install of one with them, are in make test.
@is_long
@is_long
def test_an_editable_install_of_a_clone_without_links(clicks: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    checkout = copy_checkout(tmp_path / "checkout", with_links=False)
    install(python, checkout, "-e")
    project = write_project(tmp_path / "project")
    plans([python.with_name("podembed")], project, clicks)
    assert run([python, "-m", "podembed"], "--version", folder=project).endswith(f"(checkout {checkout})\n")


@pytest.mark.parametrize("with_links", [long_case(True, id="links"), pytest.param(False, id="no-links")])
def test_a_checkout_that_is_not_installed(bare: Path, clicks: str, tmp_path: Path, with_links: bool) -> None:
    checkout = add_to_checkout(copy_checkout(tmp_path / "checkout", with_links=with_links))
    program = [bare, "-m", "podembed"]
    plans(program, checkout, clicks)
    assert run(program, "--version", folder=checkout) == f"podembed {VERSION} (checkout {checkout})\n"


def test_a_bare_folder_does_not_know_its_version(bare: Path, tmp_path: Path) -> None:
    """A copy of the package alone, beside the pyproject.toml of another program."""
    checkout = copy_checkout(tmp_path / "checkout", with_links=True)
    (tmp_path / "project").mkdir()
    run(["cp", "-rL", checkout / "podembed", tmp_path / "project"], folder=tmp_path)
    (tmp_path / "project" / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "7"\n')
    assert run([bare, "-m", "podembed"], "--version", folder=tmp_path / "project") == "podembed unknown\n"
