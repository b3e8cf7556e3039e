"""Where a worker looks for modules: in the folders of its driver as well, as far as its machine has them.

Ray tells workers the folder of the driver's script and the driver's current one. A program that puts other folders on
its path would have modules that its workers cannot import.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPath:
    """The folders of a program's search path that do not belong to its Python, in its order.

    Attributes:
      before: those that are searched before the standard library.
      after: all others.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def search_as(path: SearchPath) -> None:
    """Lets this process find modules in folders of a driver from now on. Folders that it searches already stay where
    they are, and those that its machine has not are left out.
    """
    known = {os.path.realpath(entry or ".") for entry in sys.path}

    def new(folders: tuple[str, ...]) -> list[str]:
        return [folder for folder in folders if os.path.realpath(folder) not in known and os.path.exists(folder)]

    sys.path[:] = [*new(path.before), *sys.path, *new(path.after)]


def missing_modules(path: SearchPath, packages: Iterable[str]) -> list[str]:
    """Those of the packages, or modules outside of packages, that this process would not find with such a path."""
    search_as(path)
    return [package for package in packages if not _is_there(package)]


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        # A module that was made in another way than from a file.
        return package in sys.modules


def missing_module(name: str, *, where: str = "on a machine of the cluster") -> str:
    """What is wrong where a worker cannot import what its driver can, and what to do."""
    return (
        f"Found no module '{name}' {where}, though the program that started the workers has it. Expected the same "
        "modules on all machines. Submit the program with `ray job submit --working-dir FOLDER` or with the module in "
        "py_modules of its runtime environment, or install the module there."
    )
