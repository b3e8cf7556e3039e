"""What a person types to name a run or one of its commits, turned into a store and a manifest.

`RUN` is a folder or URL and means the newest commit that counts. `RUN@COMMIT` means one commit by its full name,
whether it counts or not. Tools that only read a run start here, so that all of them refuse the same mistakes with the
same words.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_commit_names, read_lineage
from podembed.orchestrator.commit.manifest import Manifest, parse_commit_name
from podembed.orchestrator.commit.published import is_copy, refuse_copy
from podembed.orchestrator.commit.run_record import RUN_FILE, read_run
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.storage.storage_errors import NameNotFound, NotAFolder
from podembed.workers.storage.store import Store, place
from podembed.workers.storage.strict_json import DocumentRefused

_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedState:
    """One commit of a run, with the store that holds its files."""

    store: Store
    manifest: Manifest

    @property
    def location(self) -> str:
        """The reference that names it exactly."""
        return f"{self.store.location}@{self.manifest.name}"

    def table(self, name: str) -> TableFiles:
        """One table of the commit.

        Raises:
          ConfigurationError: it has no such table.
        """
        for table in self.manifest.tables:
            if table.name == name:
                return table
        raise ConfigurationError(
            f"Found no table '{name}' in {self.location}. Expected one of "
            f"{_some([t.name for t in self.manifest.tables])}. `podembed inspect` lists tables."
        )


def newest_commit(store: Store, *, allow_ancestor: bool) -> Manifest | None:
    """The commit that a run will be resumed from, or None before the first one.

    Raises:
      NameNotFound, DocumentRefused: the head is missing or damaged, and ancestors are not allowed.
    """
    lineage = read_lineage(store, rebuild=allow_ancestor)
    for name in lineage:
        try:
            return checkpoint.load(store, name)
        except (NameNotFound, DocumentRefused):
            if not allow_ancestor or name == lineage[-1]:
                raise
    return None


def open_run_store(url: str) -> Store:
    """The store of an existing run.

    Raises:
      ConfigurationError: there is no run, or a copy of its versions.
    """
    store = Store(url)
    if not _has_record(store):
        refuse_copy(store)
    if not is_run(store):
        raise ConfigurationError(
            f"Found no run in {store.location}. Expected a folder with RUN.json, alone or with one commit's full name "
            "as RUN@COMMIT. `podembed train` prints the folder of its run, `podembed inspect` lists its commits. What "
            "a `TPUEmbedding` or `Checkpoint` saved is read by its `restore`, and `podembed fsck` checks it."
        )
    return store


def open_published(url: str) -> Store:
    """The store of what servers read: a run, or a copy of its versions.

    Raises:
      ConfigurationError: there is neither.
    """
    store = Store(url)
    return store if is_copy(store) else open_run_store(url)


def is_run(store: Store) -> bool:
    """Whether a run, or what is left of one, lies here. A damaged or lost RUN.json must not keep anybody from rescuing
    tables.
    """
    try:
        return _has_record(store) or bool(read_commit_names(store))
    except NotAFolder:
        return False


def _has_record(store: Store) -> bool:
    try:
        return store.exists(RUN_FILE)
    except NotAFolder:
        return False


def open_commit(reference: str, *, commit: str | None = None) -> CommittedState:
    """Reads the manifest that a reference means.

    Args:
      reference: `RUN`, or `RUN@COMMIT`.
      commit: the commit's name, if it is given apart from the run.

    Raises:
      ConfigurationError: there is no run, no commit yet, no commit of this name, or two names.
      DocumentRefused: the manifest is damaged.
    """
    url, named = split_reference(reference)
    if named and commit and named != commit:
        raise ConfigurationError(f"Found two commits, {named} and {commit}. Expected one. Leave one out.")
    store = open_run_store(url)
    name = commit or named
    if name is None:
        lineage = read_lineage(store)
        if not lineage:
            raise ConfigurationError(
                f"Found no commit in {store.location}. Expected at least one. Wait for the run's first, or train "
                "further."
            )
        return CommittedState(store=store, manifest=_of_this_run(store, checkpoint.load(store, lineage[0])))
    return CommittedState(store=store, manifest=_of_this_run(store, load_named(store, name)))


def _of_this_run(store: Store, manifest: Manifest) -> Manifest:
    """Refuses a manifest that somebody put here from another run. Where the run's record is lost or damaged nothing is
    compared: tables may be rescued from such a run.

    Raises:
      ConfigurationError: it is another run's.
    """
    try:
        run_id = read_run(store).run_id
    except (NameNotFound, DocumentRefused):
        return manifest
    if manifest.run_id != run_id:
        raise ConfigurationError(
            f"Found commit {manifest.name} of run {manifest.run_id[:60]} in {store.location}. Expected run "
            f"{run_id[:60]}, as {RUN_FILE} says. "
            f"Somebody put it there: choose another commit, or read that one in its own run's folder."
        )
    return manifest


def split_reference(reference: str | os.PathLike[str]) -> tuple[str, str | None]:
    """(run, commit's name or None). Only a full commit name after the last `@` is taken for one: folders may have an
    `@` too.
    """
    whole = place(reference)
    url, separator, name = whole.rpartition("@")
    return (url, name) if separator and parse_commit_name(name) else (whole, None)


def load_named(store: Store, name: str) -> Manifest:
    """The manifest of a commit that somebody named.

    Raises:
      ConfigurationError: the run has no such commit; DocumentRefused: its manifest is damaged.
    """
    try:
        if parse_commit_name(name) is not None:
            return checkpoint.load(store, name)
    except NameNotFound:
        pass  # Told below, with the names that there are.
    raise ConfigurationError(
        f"Found no commit '{name[:60]}' in {store.location}. Expected one of {_some(read_lineage(store))}. "
        f"`podembed inspect {store.location}` lists them all."
    )


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown or "none (there is none yet)"
