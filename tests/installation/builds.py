"""Copies of the checkout, what is built from them, and environments in which only that is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.architecture.test_imports import FLOORS, ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def copy_checkout(folder: Path, *, with_links: bool) -> Path:
    """What a clone has of the program. Without links, git writes a file with the target's name in place of each."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("podembed", "docs", *FLOORS):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    if not with_links:
        for name in ("docs", *FLOORS):
            link = folder / "podembed" / name
            target = os.readlink(link)
            link.unlink()
            link.write_text(target)
    return folder


def build_wheel(checkout: Path) -> Path:
    """Builds as pip does, with the setuptools of this environment instead of one from the network."""
    out = checkout / "dist"
    _run([sys.executable, "-c", BUILD.format("wheel"), str(out)], folder=checkout)
    (wheel,) = out.glob("*.whl")
    return wheel


def build_source_archive(checkout: Path) -> Path:
    """Builds an sdist, and returns the folder that it unpacks to."""
    out = checkout / "dist"
    _run([sys.executable, "-c", BUILD.format("sdist"), str(out)], folder=checkout)
    (archive,) = out.glob("*.tar.gz")
    # `tarfile` has filters only since Python 3.11.4.
    shutil.unpack_archive(archive, checkout / "unpacked")
    (unpacked,) = (checkout / "unpacked").iterdir()
    return unpacked


def environment(folder: Path) -> Path:
    """An environment with all that this one has, except podembed; its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    library = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Only the folder is added: what its own .pth files do, such as an editable install, is left out.
    (library / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def install(python: Path, what: Path, *options: str) -> None:
    """Installs a wheel, or with `-e` a checkout, into an environment."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    # An install of the environment below is no reason to leave this one out.
    pip += ["--ignore-installed", "--no-build-isolation", "--disable-pip-version-check"]
    _run([*pip, *options, str(what)], folder=python.parent)


def _run(command: Sequence[str], *, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
