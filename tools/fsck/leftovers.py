"""What lies in a run and no reader uses: attempts that never became commits, commits that do not count, and files that
belong to neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import LEASE_FILE, read_claims, read_commit_names, read_lineage
from podembed.orchestrator.commit.manifest import commit_file, parse_commit_name
from podembed.orchestrator.commit.published import published_commits
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Files below `path`, or the file itself, and why no reader needs them."""

    path: str
    what: str
    num_files: int
    num_bytes: int


def find_leftovers(store: Store, *, going: Collection[str] = ()) -> tuple[Leftover, ...]:
    """Lists `data/`, `commit/` and `lease/`; opens bases and the manifests of the lineage and no other file.

    A commit whose manifest cannot be read needs all of its own folder, since the list of its files is lost.

    Args:
      going: commits that the keep policies are deleting, or were when their pass was cut short.

    Raises:
      DocumentRefused: a base is damaged, so it is unknown which commits count.
    """
    files = {folder: store.sizes(folder) for folder in ("data", "commit", "lease")}
    # After the listings: what a driver commits meanwhile then counts already.
    lineage = read_lineage(store)
    counted = [*lineage, *(_published(store) - {*lineage})]
    manifests = set(map(commit_file, counted))
    needed, unreadable = _needed(store, counted)
    newest = max(read_claims(store), default=0)
    grouped: dict[str, list[int]] = defaultdict(list)
    for name, size_bytes in files["data"].items():
        folder = name.split("/")[1]
        if name not in needed and folder not in unreadable:
            grouped[f"data/{folder}"].append(size_bytes)
    for name, size_bytes in files["commit"].items():
        if name not in manifests:
            grouped[name].append(size_bytes)
    for name, size_bytes in files["lease"].items():
        if not LEASE_FILE.fullmatch(name.removeprefix("lease/")):
            grouped[name].append(size_bytes)
    return tuple(
        Leftover(
            path=path, what=_what(path, lineage, newest=newest, going=going), num_files=len(sizes), num_bytes=sum(sizes)
        )
        for path, sizes in sorted(grouped.items())
    )


def _published(store: Store) -> set[str]:
    """Commits that servers answer with, or that are pinned. They stay where training went back to one before them."""
    try:
        return published_commits(store).intersection(read_commit_names(store))
    except DocumentRefused:
        return set()  # A finding of its own.


def _needed(store: Store, lineage: Sequence[str]) -> tuple[set[str], set[str]]:
    """Files that the lineage names, and its commits whose manifests cannot be read."""
    needed: set[str] = set()
    unreadable: set[str] = set()
    for name in lineage:
        try:
            needed |= checkpoint.load(store, name).file_sizes().keys()
        except StorageError:
            unreadable.add(name)
    return needed, unreadable


def _what(path: str, lineage: tuple[str, ...], *, newest: int, going: Collection[str]) -> str:
    kind, _, rest = path.partition("/")
    parsed = parse_commit_name(rest.removesuffix(".json") if kind == "commit" else rest)
    if parsed is None:
        return "files of nobody that writes runs"
    if kind == "commit":
        return "a commit that does not count: its driver had been replaced"
    if rest in lineage:
        return "extra files in a commit's folder"
    if rest in going:
        return "a commit that is being deleted; the next pass of the keep policies, or podembed prune, goes on with it"
    head = parse_commit_name(lineage[0]) if lineage else None
    if parsed[1] == newest and (head is None or head[1] < newest or parsed > head):
        return f"an attempt of generation {newest}, the newest: its driver may be writing it"
    return "an attempt that is no commit that counts"
