"""Which tests with Ray run in one process: those that share what is expensive to start.

pytest-xdist has `--dist loadgroup` for this. Its version 3.8.0 writes the groups to a field that pytest 9.2 does not
read, so every test is a group of its own: https://github.com/pytest-dev/pytest-xdist/issues/1386
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Session fixtures, and the group of the files that name them. The first that is found counts.
GROUPS = {"pod_strategy": "pods", "ray_cluster": "cluster", "two_hosts": "cluster"}


class FilesThatShare(LoadScopeScheduling):
    """Gives a process one file at a time, or all files that share a fixture, in the order of the files."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        # Otherwise the largest number of tests comes first, and a single test that takes a minute last.
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._groups: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file not in self._groups:
            text = (self.config.rootpath / file).read_text(encoding="utf-8")
            self._groups[file] = next((group for name, group in GROUPS.items() if name in text), file)
        return self._groups[file]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesThatShare | None:
    return FilesThatShare(config, log) if config.getvalue("dist") == "loadscope" else None
