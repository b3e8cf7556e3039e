"""`deleting/g<generation>-<number>.json`: which commits from between others a pass of the keep policies is about to
delete.

A commit's manifest goes before its files. A pass that is cut short therefore leaves files without a manifest, and the
commit after it names a parent that is gone. A lost manifest looks exactly like that. This record is written before the
first manifest goes, and distinguishes the two. A pass that has left nothing of what the records name removes all those
of its own generation and of older ones. Only `fsck` reads them; a driver that goes on with the run does not need them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from podembed.workers.storage.records import decode, encode, read_document
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import MAX_DOCUMENT_BYTES, DocumentRefused

FOLDER = "deleting"
_FILE = re.compile(r"g(\d{8,12})-(\d{5,9})\.json")
# Of one record, far below what a document may hold.
_MAX_COMMITS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Commits, by name, that a driver of this generation deletes."""

    generation: int
    commits: tuple[str, ...]


def read_deletions(store: Store) -> tuple[frozenset[str], tuple[DocumentRefused, ...]]:
    """All commits that records name, and what is wrong with records that cannot be read."""
    commits: set[str] = set()
    refused: list[DocumentRefused] = []
    for file in _files(store):
        name = f"{FOLDER}/{file}"
        try:
            commits.update(decode(Deletion, name, read_document(store, name, max_bytes=MAX_DOCUMENT_BYTES)).commits)
        except DocumentRefused as error:
            refused.append(error)
        except NameNotFound:
            continue  # The pass that wrote it has ended meanwhile.
    return frozenset(commits), tuple(refused)


def record_deletion(store: Store, commits: Sequence[str], *, generation: int) -> None:
    """Writes down what is about to go, but for what records name already.

    Raises:
      StorageError: somebody else wrote a record of this generation.
    """
    known, _ = read_deletions(store)
    new = [name for name in commits if name not in known]
    number = max((int(match.group(2)) for match in map(_FILE.fullmatch, _files(store)) if match), default=0)
    for start in range(0, len(new), _MAX_COMMITS):
        number += 1
        name = f"{FOLDER}/g{generation:08d}-{number:05d}.json"
        record = Deletion(generation=generation, commits=tuple(new[start : start + _MAX_COMMITS]))
        if not store.create_exclusive(name, encode(record)):
            raise StorageError(
                f"Found {name} in {store.location}, written by somebody else. Expected this driver alone to write for "
                "generation "
                f"{generation}. Nothing was deleted: see that one program at a time deletes commits of the run."
            )


def forget_deletions(store: Store, *, up_to_generation: int) -> None:
    """Removes the records of these generations, of whose commits nothing is left that could be taken for damage."""
    for file in _files(store):
        match = _FILE.fullmatch(file)
        if match is not None and int(match.group(1)) <= up_to_generation:
            store.delete(f"{FOLDER}/{file}")


def _files(store: Store) -> list[str]:
    return [file for file in store.children(FOLDER) if _FILE.fullmatch(file)]
