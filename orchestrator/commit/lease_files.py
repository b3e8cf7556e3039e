"""What the files of `lease/` and `commit/` say: which generations there are, where each began, and so which commits
count.

A base says where a generation began. So does the parent of its first commit, so a lost or damaged base stops no reader
that needs only the older commits. Without the newest base it is uncertain which commit is the newest. A user who wants
to go on all the same says so (`rebuild`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from podembed.orchestrator.commit.lease_protocol import Base, head, lineage
from podembed.orchestrator.commit.manifest import MAX_MANIFEST_BYTES, commit_file, from_json, parse_commit_name
from podembed.workers.storage.records import decode, read_document
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

LEASE_FILE = re.compile(r"g(\d{8,12})\.(claim|base\.json|hb)")
MAX_LEASE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRecord:
    """Content of a base: the commit from which the generation starts."""

    generation: int
    commit: str | None
    created_unix_s: float
    token: str


class BaseLost(DocumentRefused):
    """The base that decides which commits count is missing or damaged."""

    may_pass = False

    def __init__(self, name: str, found: str, location: str):
        super().__init__(name, found, "the base of a generation, which says which commits count")
        self.args = (
            f"'{name}' in {location}: found {found}; expected {self.expected}. Restore the file from a copy; or go on "
            "from the newest commit "
            f"that the other files show (podembed resume --allow-ancestor). To read one commit, name it: RUN@COMMIT.",
        )


def lease_file(generation: int, kind: str) -> str:
    return f"lease/g{generation:08d}.{kind}"


def read_claims(store: Store) -> list[int]:
    """Generations that have been claimed, in order."""
    return _generations(store, "claim")


def read_used_generations(store: Store) -> list[int]:
    """Generations that no driver may claim again: those with a claim, and those that left a base or a commit, should
    their claims be lost.
    """
    return sorted({*read_claims(store), *_generations(store, "base.json"), *_committed(read_commit_names(store))})


def read_commit_names(store: Store) -> list[str]:
    """Names of all published commits, whether they count or not."""
    files = (file.removesuffix(".json") for file in store.children("commit") if file.endswith(".json"))
    return [name for name in files if parse_commit_name(name)]


def read_base(store: Store, generation: int) -> Base:
    """The base of one generation.

    Raises:
      NameNotFound: it has none; DocumentRefused: it is damaged.
    """
    name = lease_file(generation, "base.json")
    record = decode(BaseRecord, name, read_document(store, name, max_bytes=MAX_LEASE_BYTES))
    if record.generation != generation:
        raise DocumentRefused(name, f"the base of generation {record.generation}", f"generation {generation}")
    if record.commit is not None:
        parsed = parse_commit_name(record.commit)
        if parsed is None or parsed[1] >= generation:
            raise DocumentRefused(name, f"base {record.commit[:60]!r}", "a commit of an older generation")
    return Base(generation, record.commit)


def read_newest_base(store: Store, *, rebuild: bool = False) -> Base | None:
    """The base of the highest generation that has one: the one that decides which commits count.

    Args:
      rebuild: whether, where that base is lost or damaged, to take what the generation's first commit names as its
        parent. A generation without commits is passed over: nothing was acknowledged in it.

    Raises:
      BaseLost: it is, and `rebuild` is not set.
    """
    commits = read_commit_names(store)
    for generation in reversed(generations_with_base(store)):
        try:
            return read_base(store, generation)
        except (NameNotFound, DocumentRefused) as error:
            if not rebuild:
                raise BaseLost(lease_file(generation, "base.json"), error.found, store.location) from error
        if generation in _committed(commits):
            return _told_base(store, generation, commits) or Base(generation, None)
    return None


def newest_base_file(store: Store) -> str | None:
    """The name of the base that `read_newest_base` reads, whether it is there or not; None before the first."""
    return max((lease_file(generation, "base.json") for generation in generations_with_base(store)), default=None)


def generations_with_base(store: Store) -> list[int]:
    """Generations that have a base, or a commit, which follows the base of its generation; in order."""
    committed = _committed(read_commit_names(store))
    return sorted({*_generations(store, "base.json"), *committed})


def read_head(store: Store) -> str | None:
    """The newest commit that counts, for readers that hold no lease."""
    return head(read_newest_base(store), read_commit_names(store))


def read_lineage(store: Store, *, rebuild: bool = False, whole: bool = False) -> tuple[str, ...]:
    """The commits that count, newest first.

    An older base that is lost is rebuilt from the commits. Where they do not tell it either, the lineage ends there.

    Args:
      rebuild: as `read_newest_base`.
      whole: refuse a lineage that ends early; for those that delete what is not in it.

    Raises:
      BaseLost: see `rebuild` and `whole`.
    """
    base = read_newest_base(store, rebuild=rebuild)
    commits = read_commit_names(store)
    return lineage(base, commits, partial(_older_base, store, commits, whole=whole))


def _older_base(store: Store, commits: Sequence[str], generation: int, *, whole: bool) -> str | None:
    try:
        return read_base(store, generation).commit
    except (NameNotFound, DocumentRefused) as error:
        told = _told_base(store, generation, commits)
        if told is None and whole:
            raise BaseLost(lease_file(generation, "base.json"), error.found, store.location) from error
        return told.commit if told else None


def _told_base(store: Store, generation: int, commits: Sequence[str]) -> Base | None:
    """The base of a generation as its first commit tells it; None if it does not, or is gone."""
    own = sorted(name for name in commits if _committed([name]) == {generation})
    try:
        name = own[0]
        parent = from_json(name, read_document(store, commit_file(name), max_bytes=MAX_MANIFEST_BYTES)).parent
    except (IndexError, NameNotFound, DocumentRefused):
        return None
    # With a parent of its own it is not the first: the keep policy has deleted that one.
    return None if parent and generation in _committed([parent]) else Base(generation, parent)


def _committed(commits: Sequence[str]) -> set[int]:
    return {parsed[1] for name in commits if (parsed := parse_commit_name(name))}


def _generations(store: Store, kind: str) -> list[int]:
    matches = map(LEASE_FILE.fullmatch, store.children("lease"))
    return sorted(int(match.group(1)) for match in matches if match and match.group(2) == kind)
