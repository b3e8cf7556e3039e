"""Where Ray's workers look for modules: as the driver does, not first in the folder in which somebody started it.

Ray puts the driver's current folder before everything else on the search path of every worker. A `random.py` that lies
there would then run in all of them, though the driver itself never looks at it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ray.job_config import JobConfig


def is_searched_first(folder: str, path: list[str]) -> bool:
    """Whether modules of a folder stand in for those of the standard library."""
    library = os.path.dirname(os.__file__)
    first = path[: path.index(library)] if library in path else path
    return any(os.path.realpath(entry or ".") == os.path.realpath(folder) for entry in first)


class DriverPath(JobConfig):
    """Ray's settings of a driver, whose workers search the current folder first only where the driver does so, too."""

    def _get_proto_job_config(self) -> Any:
        # Filled in by `ray.init`, which offers no setting for it.
        self._py_driver_sys_path = [
            folder
            for folder in self._py_driver_sys_path
            if folder != os.path.abspath(os.path.curdir) or is_searched_first(folder, sys.path)
        ]
        return super()._get_proto_job_config()
