"""Where Ray's workers look for modules: as the driver does, and not first in the folder in which somebody started it.

Ray puts the driver's current folder before everything else on the search path of every worker. A `random.py` that lies
there would then run in all of them, though the driver itself never looks at it. Folders that a program put on its path
are not sent by Ray; `workers.search_path` has what a worker does with them.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from typing import Any

from ray.job_config import JobConfig

import podembed
from podembed.workers.search_path import SearchPath

_PROGRAM = os.path.dirname(os.path.dirname(os.path.abspath(podembed.__file__)))


def is_searched_first(folder: str, path: list[str]) -> bool:
    """Whether modules of a folder stand in for those of the standard library."""
    library = os.path.dirname(os.__file__)
    first = path[: path.index(library)] if library in path else path
    return any(os.path.realpath(entry or ".") == os.path.realpath(folder) for entry in first)


def driver_path() -> SearchPath:
    """Folders in which this program looks for modules, but for those of its Python: workers have their own."""
    paths = sysconfig.get_paths()
    libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    libraries |= {*site.getsitepackages(), site.getusersitepackages()}
    of_python = tuple(os.path.realpath(library) for library in libraries)
    below = tuple(library + os.sep for library in of_python)
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    before: list[str] = []
    after: list[str] = []
    found = before
    for entry in sys.path:
        folder = os.path.abspath(entry or ".")
        real = os.path.realpath(folder)
        if real in of_python:
            found = after
        elif real.startswith(below) or os.path.basename(real) == archive or not os.path.exists(real):
            # Below the libraries lie compiled modules and what packages bring along, beside them an archive.
            continue
        elif folder not in (*before, *after):
            found.append(folder)
    return SearchPath(before=tuple(before), after=tuple(after))


class DriverPath(JobConfig):
    """Ray's settings of a driver, whose workers search the current folder first only where the driver does so, too."""

    def _get_proto_job_config(self) -> Any:
        # Filled in by `ray.init`, which offers no setting for it.
        self._py_driver_sys_path = [
            folder
            for folder in self._py_driver_sys_path
            if folder != os.path.abspath(os.path.curdir) or is_searched_first(folder, sys.path)
        ]
        # A worker must find this program before it can be told of any other folder.
        if _PROGRAM in driver_path().before and _PROGRAM not in self._py_driver_sys_path:
            self._py_driver_sys_path.insert(0, _PROGRAM)
        return super()._get_proto_job_config()
