"""`Following`: publishes the commits of a run as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.commit.published import commit_of_version, newest_pointer
from podembed.orchestrator.run.reference import open_run_store
from podembed.serving.publish.publisher import Offer, publish


class Following:
    """Mutated by `new`: which commit was looked at last.

    Args:
      every_commit: each commit in its order; else the newest at each look.
      options: further arguments of `publish`.
    """

    poll_s = 1.0

    def __init__(self, run: str, *, every_commit: bool, options: Mapping[str, Any]) -> None:
        self._run, self._every_commit, self._options = run, every_commit, options
        self._store = open_run_store(run)
        pointer = newest_pointer(self._store)
        self._last = commit_of_version(pointer.version) if pointer is not None else None

    def new(self) -> Iterator[Offer]:
        """Publishes what has come since the last look.

        Raises:
          ConfigurationError, StorageError: as `publish`.
        """
        lineage = read_lineage(self._store)
        names = lineage[: lineage.index(self._last)] if self._last in lineage else lineage
        if self._last is not None and self._last not in lineage:
            # Deleted meanwhile, or training went back to a commit before it.
            names = [name for name in lineage if (parse_commit_name(name) or (0, 0)) > self._at(self._last)]
        for name in reversed(names if self._every_commit else names[:1]):
            self._last = name
            yield publish(self._run, commit=name, **self._options)

    def _at(self, name: str) -> tuple[int, int]:
        return parse_commit_name(name) or (0, 0)
