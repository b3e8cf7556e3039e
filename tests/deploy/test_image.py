"""`deploy/Dockerfile`: its commands run in their order in an empty environment, as far as that goes without a daemon.

In the place of the image is a fresh virtual environment, and a folder in the place of `/`. What the image's system
packages bring is left out: no package of Debian is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_imports import FLOORS, ROOT
from tests.deploy.files import DOCKERFILE
from tests.long_tests import is_long

END_S = 900


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the file with its arguments, in order."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def test_the_image_is_of_a_python_that_the_project_takes() -> None:
    (name, image), *_ = instructions()
    assert (name, image) == ("FROM", "python:3.13-slim")


def test_what_is_copied_is_all_that_an_install_needs() -> None:
    copied = {source for name, words in instructions() if name == "COPY" for source in words.split()[:-1]}
    assert copied == {
        "constraints.txt",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "podembed",
        "docs",
        *FLOORS,
    }
    assert all((ROOT / name).exists() for name in copied)


class Image:
    """What stands for the image: a folder for `/`, and the environment. Mutated: the working folder and variables."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "root"
        self._folder = self._root
        self._root.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        # How pip reaches its index here.
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
        path = os.pathsep.join([str(folder / "env" / "bin"), "/usr/local/bin", "/usr/bin", "/bin"])
        self._variables = {**kept, "PATH": path, "HOME": str(folder), "JAX_PLATFORMS": "cpu"}

    def carry_out(self, name: str, words: str) -> None:
        match name:
            case "FROM":
                pass
            case "ARG":
                variable, _, value = words.partition("=")
                self._variables[variable] = value
            case "WORKDIR":
                self._folder = self._root / words.lstrip("/")
                self._folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = words.split()
                for source in sources:
                    self._copy(ROOT / source, self._folder / target)
            case "RUN":
                if not words.startswith("apt-get "):
                    self.run(words)
            case _:
                raise AssertionError(f"{name} is not known here")

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self._folder,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=END_S,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


@pytest.mark.slow
@is_long
def test_the_commands_make_an_environment_that_trains(tmp_path: Path) -> None:
    image = Image(tmp_path)
    for name, words in instructions():
        image.carry_out(name, words)
    found = image.run("podembed train --job synthetic --in-process --max-steps 3 --storage runs --name first")
    assert "done at step 3 of 3" in found
