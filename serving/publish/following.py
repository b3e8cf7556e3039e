"""`Following`: publishes the commits of a run as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.commit.published import commit_of_version
from podembed.orchestrator.run.reference import open_run_store
from podembed.serving.publish.publisher import Offer, publish
from podembed.serving.publish.versions import version_names
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.storage.store import Store


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
        # Not from the version that counts: after a rollback a newer one was offered already, and must not come back.
        offers = Store(to) if (to := options.get("to")) is not None else self._store
        commits = [commit_of_version(name) or "" for name in version_names(offers)]
        self._last = max(commits, key=_order, default=None)

    def new(self) -> Iterator[Offer]:
        """Publishes what has come since the last look. A commit that cannot be published is not tried again,
        except after an error of the storage.

        Raises:
          ConfigurationError, StorageError: as `publish`.
        """
        lineage = read_lineage(self._store)
        names = [name for name in lineage if self._last is None or _order(name) > _order(self._last)]
        for name in reversed(names if self._every_commit else names[:1]):
            try:
                offer = publish(self._run, commit=name, **self._options)
            except (ConfigurationError, ChunkDamaged):
                self._last = name
                raise
            self._last = name
            yield offer


def _order(name: str) -> tuple[int, int]:
    """Later generations go on from older ones, at the same step or an earlier one."""
    step, generation = parse_commit_name(name) or (0, 0)
    return generation, step
