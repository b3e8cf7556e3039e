"""The folder in which a job's module may lie: searched for what is found nowhere else.

On the search path, even as its last folder, it would come before namespace packages and whatever import hooks find. Any
file in it could then stand in for a module of an installed package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _LastFolder:
    """Finds modules and packages that lie directly in a folder; what is in such a package, Python finds itself."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Modules of Python for other systems are asked for, too, by libraries that expect to miss them here.
        if path is not None or name in sys.stdlib_module_names:
            return None
        return PathFinder.find_spec(name, [self.folder], target)


def search_last(folder: str, *, for_package: str) -> None:
    """Lets modules be found in a folder from now on, unless the package is found without it."""
    known = [finder.folder for finder in sys.meta_path if isinstance(finder, _LastFolder)]
    if folder not in known and not _is_found(for_package):
        sys.meta_path.append(_LastFolder(folder))


def _is_found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        # A module that was made in another way than from a file.
        return package in sys.modules
