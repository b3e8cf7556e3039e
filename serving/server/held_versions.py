"""`HeldVersions`: the newest versions of a run in memory, of which one answers. It follows the log of pointers.

A version is loaded beside the one that answers, and takes its place when it is whole. The version before stays until
the next one comes, so a rollback to it takes no reading.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.checkpoint import load
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.commit.published import Pointer, newest_pointer
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.publish.versions import SCHEMA, Version, manifest_digest, read_file, read_version
from podembed.serving.served_files import served_files
from podembed.serving.server.rows import RowsByKey, RowsByNumber, TableMemory, TableRows
from podembed.serving.server.shares import ShardPlace
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class HeldVersion:
    """A version in memory. Mutated: how many answers are being made with it.

    Attributes:
      number: of the pointer that offered it.
      tables: by name.
    """

    version: Version
    number: int
    manifest: Manifest
    tables: dict[str, TableRows]
    loaded_unix_s: float
    num_users: int = field(default=0)

    @property
    def name(self) -> str:
        return self.version.name


class NotYet(Exception):
    """A version cannot be loaded yet, but will be."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A pointer whose version could not be loaded, and until when that is not tried again."""

    pointer: Pointer
    pause_s: float
    until_s: float


V = TypeVar("V", bound=HeldVersion)


class HeldVersions(ABC, Generic[V]):
    """See the module. One thread loads versions; any may `use` one.

    Args:
      share: which rows are held.
      memory: where they lie.
      clock: of the machine.

    Attributes:
      error: why the newest pointer is not followed, or None.
    """

    def __init__(
        self,
        store: Store,
        *,
        share: ShardPlace | None = None,
        memory: TableMemory | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store, self._share, self._clock = store, share or ShardPlace(), clock
        self._memory = memory or TableMemory()
        # The last one was made last. At most two.
        self._chain: list[V] = []
        self._current: V | None = None
        self._changed = threading.Condition()
        self._failed: _Failed | None = None
        self.error: str | None = None
        self.num_swaps = 0

    @property
    def current(self) -> V | None:
        """The version that answers; None before the first."""
        return self._current

    @property
    def names(self) -> list[str]:
        """The versions in memory, the one that answers first."""
        with self._changed:
            return [one.name for one in sorted(self._chain, key=lambda one: one is not self._current)]

    @contextmanager
    def use(self, name: str | None = None) -> Iterator[V]:
        """A version, by default the one that answers. Its rows stay as they are until the block ends.

        Raises:
          ConfigurationError: it is not in memory.
        """
        with self._changed:
            named = next((one for one in self._chain if one.name == name), None)
            found = self._current if name is None else named
            if found is None:
                raise ConfigurationError(
                    f"Found no version {name or ''} of {self._store.location} loaded. Expected one. Wait."
                )
            found.num_users += 1
        try:
            yield found
        finally:
            with self._changed:
                found.num_users -= 1
                self._changed.notify_all()

    def follow(self) -> bool:
        """Loads the version of the newest pointer, if another one answers. Returns whether it changed.

        An error leaves the version that answers where it is; `error` says it.

        Raises:
          ConfigurationError, StorageError, ModelError, NotYet: the first version cannot be loaded.
        """
        pointer = None
        try:
            pointer = newest_pointer(self._store)
            if pointer is None:
                raise ConfigurationError(
                    f"Found no published version in {self._store.location}. Expected one. Publish a commit: podembed "
                    f"publish {self._store.location}."
                )
            current = self._current
            # A damaged pointer may have been moved away, and another one have its number.
            if current is not None and (current.number, current.name) == (pointer.number, pointer.version):
                self.error = None
                return False
            if self._waits(pointer):
                return False
            began_s = self._clock.monotonic_s()
            known = next((one for one in self._chain if one.name == pointer.version), None)
            found = known or self._load(read_version(self._store, pointer.version), pointer.number)
            found.number = pointer.number
        except NotYet as error:
            # Of a few seconds at each new version.
            self.error = str(error)
            if self._current is None:
                raise
            return False
        except Exception as error:
            # Whatever is wrong with the next version, the one that answers goes on.
            if self._current is None:
                raise
            if str(error) != self.error:
                _logger.warning("%s goes on to answer: %s", self._current.name, error)
            self.error = str(error)
            self._wait(pointer, error)
            return False
        with self._changed:
            self._current, self.error = found, None
            self.num_swaps += 1
            self._changed.notify_all()
        _logger.info("%s answers after %.2f s", found.name, self._clock.monotonic_s() - began_s)
        return found is not current

    def _waits(self, pointer: Pointer) -> bool:
        """Whether the version of a pointer could not be loaded, and it is too early to try again."""
        failed = self._failed
        return failed is not None and failed.pointer == pointer and self._clock.monotonic_s() < failed.until_s

    def _wait(self, pointer: Pointer | None, error: Exception) -> None:
        """Notes that a version could not be loaded. What is wrong with a model stays so; a storage may be mended."""
        if pointer is None:
            return
        before = self._failed
        pause_s = 2 * before.pause_s if before is not None and before.pointer == pointer else _FIRST_PAUSE_S
        pause_s = math.inf if isinstance(error, ModelError) else min(pause_s, _LONGEST_PAUSE_S)
        self._failed = _Failed(pointer, pause_s, self._clock.monotonic_s() + pause_s)

    def answer_with(self, version: Version) -> None:
        """Loads a version, whatever pointers say.

        Raises:
          ConfigurationError, StorageError, ModelError: it cannot be loaded.
        """
        found = self._load(version, 0)
        with self._changed:
            self._current = found
            self._changed.notify_all()

    @abstractmethod
    def _ready(self, held: HeldVersion, document: Mapping[str, Any]) -> V:
        """A version that can answer, of one whose tables are in memory.

        Args:
          document: the schema of its model.

        Raises:
          ConfigurationError, StorageError, ModelError: it cannot.
        """

    def _load(self, version: Version, number: int) -> V:
        manifest = self._manifest(version)
        document = _document(read_file(self._store, version, SCHEMA), version)
        tables, made = self._tables(version, manifest, document)
        try:
            held = HeldVersion(
                version=version, number=number, manifest=manifest, tables=tables, loaded_unix_s=self._clock.wall_s()
            )
            found = self._ready(held, document)
        except BaseException:
            _undo(made)
            raise
        with self._changed:
            self._chain.append(found)
        return found

    def _tables(
        self, version: Version, manifest: Manifest, document: Mapping[str, Any]
    ) -> tuple[dict[str, TableRows], list[Any]]:
        """The tables of a version, and those of them that were made of tables of the version before, with these.

        Raises:
          ChunkDamaged, StorageError: they cannot be read.
        """
        store, before = self._store, self._before()
        tables: dict[str, TableRows] = {}
        made: list[Any] = []
        try:
            for described in document["tables"]:
                name = described["name"]
                files = next(one for one in manifest.tables if one.name == name)
                since = before and next((one for one in before.manifest.tables if one.name == name), None)
                own: Any = before and before.tables.get(name)
                if since is not None and _is_alike(since, files, own, described):
                    tables[name] = own.next(store, files, since)
                    made.append((tables[name], own))
                    continue
                share = self._share.in_table(files)
                has_keys = described["keys"] is not None
                tables[name] = (
                    RowsByKey.of(store, files, described["keys"], share, self._memory)
                    if has_keys
                    else RowsByNumber.of(store, files, share, self._memory)
                )
        except BaseException:
            _undo(made)
            raise
        return tables, made

    def _unneeded(self, older: V, newer: V) -> V:
        """Which of two versions goes before a third one comes: the one that does not answer. After a rollback the older
        one answers.
        """
        return newer if older is self._current else older

    def _let_go(self, version: V) -> None:
        """Takes a version out of memory, and returns when nobody uses it any more."""
        with self._changed:
            self._chain.remove(version)
            self._changed.wait_for(lambda: not version.num_users)

    def _manifest(self, version: Version) -> Manifest:
        try:
            digest, manifest = manifest_digest(self._store, version.commit), load(self._store, version.commit)
        except NameNotFound as error:
            raise ConfigurationError(
                f"Found no commit {version.commit} in {self._store.location}, which version {version.name} is made of. "
                "Expected it: it was deleted, or not copied. Publish another commit."
            ) from error
        if digest != version.manifest_sha256 or manifest.run_id != version.run_id:
            raise DocumentRefused(f"commit/{version.commit}.json", "another manifest", f"that of {version.name}")
        return served_files(manifest)

    def _before(self) -> V | None:
        """The version from which the next is made. Of two, the one that does not answer goes, so that there is room."""
        if len(self._chain) == 2:
            older, newer = self._chain
            gone = self._unneeded(older, newer)
            if gone is self._current:
                self._current = older if gone is newer else newer
            self._let_go(gone)
            for name, one in older.tables.items():
                other = newer.tables.get(name)
                if not isinstance(one, _CHAINED) or not isinstance(other, _CHAINED) or one.arena is not other.arena:
                    continue
                # Tables of one arena are of one kind.
                if gone is newer:
                    other.undo(one)  # pyright: ignore[reportArgumentType]
                else:
                    one.drop(other)  # pyright: ignore[reportArgumentType]
        return self._chain[0] if self._chain else None


_CHAINED = (RowsByNumber, RowsByKey)


def _undo(made: list[Any]) -> None:
    for table, before in made:
        table.undo(before)


def _document(data: bytes, version: Version) -> dict[str, Any]:
    document = json.loads(data)
    if not isinstance(document, dict) or document.get("commit") != version.commit:
        raise DocumentRefused(SCHEMA, "another schema", f"that of {version.name}")
    return document


def _is_alike(since: Any, files: Any, rows: Any, described: Mapping[str, Any]) -> bool:
    """Whether a table can be made of its version before."""
    alike = (since.num_rows, since.dim, since.num_buckets) == (files.num_rows, files.dim, files.num_buckets)
    if described["keys"] is None:
        return alike and isinstance(rows, RowsByNumber)
    return alike and isinstance(rows, RowsByKey) and rows.described == described["keys"]
