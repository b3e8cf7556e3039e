"""Carrying out the keep policies: the deletion of what no reader can need.

Only two kinds of files are ever deleted, both inside the run. The first belong to lineage commits older than the ones
kept. The second belong to attempts of older generations that never joined the lineage. A file that a kept commit names
stays, wherever it lies. Claims are listed before every batch, so a driver that was replaced stops; what it had already
planned is garbage for its successor too. The next pass finishes one that is cut short; `orchestrator.commit.deletions`
says what a reader finds meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.keep_policies import CommitMetrics, KeepPolicy
from podembed.orchestrator.api.keep_policies import kept as kept_by
from podembed.orchestrator.commit.checkpoint import load
from podembed.orchestrator.commit.deletions import forget_deletions, record_deletion
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.lease_files import read_commit_names, read_lineage
from podembed.orchestrator.commit.manifest import commit_file, parse_commit_name
from podembed.orchestrator.commit.published import published_commits
from podembed.orchestrator.commit.verification import size_damages
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store

MIN_KEPT = 2
_BATCH_FILES = 500
_STALE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The result of one pass of the keep policies.

    Attributes:
      commits: names of those whose manifest was deleted.
      attempts: folders of `data/` from which files went, whether they had been commits or not.
    """

    commits: tuple[str, ...]
    attempts: tuple[str, ...]
    num_files: int
    num_bytes: int


def read_committed(store: Store, names: Iterable[str]) -> list[CommitMetrics]:
    """The step and metrics of these commits, in the same order.

    Raises:
      StorageError: a manifest is missing or damaged.
    """
    manifests = (load(store, name) for name in names)
    return [CommitMetrics(name=manifest.name, step=manifest.step, metrics=manifest.metrics) for manifest in manifests]


def keep_latest(
    store: Store,
    lease: Lease,
    *,
    num_to_keep: int,
    also: Sequence[KeepPolicy] = (),
    without: Collection[str] = (),
    unix_s: Callable[[], float] = time.time,
) -> Removal:
    """Deletes what the newest `num_to_keep` commits of the lineage, those that are published or pinned, and those that
    other policies name, do not need.

    Nothing goes unless the newest commit is whole: its manifest is read, and every file of it is there with its size. A
    pass that is cut short is finished by a later one.

    Args:
      num_to_keep: at least 2, so that a damaged commit has an ancestor.
      also: further reasons to keep a commit.
      without: names of commits that go whatever would keep them; the newest one stays.
      unix_s: the wall clock, for the age of half-written files that killed drivers left.

    Raises:
      Fenced: a newer driver has taken over; nothing more is deleted.
      StorageError: the newest commit is not whole, or a kept one cannot be read, so what it needs is unknown; nothing
        is deleted.
    """
    if num_to_keep < MIN_KEPT:
        raise ValueError(
            f"num_to_keep={num_to_keep}; at least {MIN_KEPT} expected, so that a damaged commit has an ancestor."
        )
    lease.check()
    lineage = read_lineage(store, whole=True)
    if lease.head is not None and lease.head not in lineage[:1]:
        raise StorageError(
            f"The run's newest commit is {lineage[:1]}, but this driver acknowledged {lease.head}. Nothing was "
            "deleted: look into commit/ and lease/ of the run."
        )
    kept = set(lineage[:num_to_keep])
    if also and len(lineage) > num_to_keep:
        kept |= kept_by(also, read_committed(store, lineage))
    names = read_commit_names(store)
    # What servers answer with stays, also where training has gone back to a commit before it.
    kept |= published_commits(store, now_unix_s=unix_s()).intersection(names)
    kept -= {*without} - {*lineage[:1]}
    # Oldest first: what is left at any moment then begins with a commit whose parent is before all of them.
    removable = sorted(
        (name for name in names if name not in kept and _is_settled(name, lineage, lease)),
        key=lambda name: parse_commit_name(name) or (0, 0),
    )
    attempts = [name for name in store.children("data") if name not in kept and _is_settled(name, lineage, lease)]
    if lineage and (removable or attempts):
        _check_newest(store, lineage[0])
    needed = {name for commit in kept for name in load(store, commit).file_sizes()} if attempts else set()
    # Before the first deletion: a reader that misses a commit then finds that it was meant.
    record_deletion(store, _from_between(removable, kept, lineage), generation=lease.generation)
    for name in removable:
        # The manifest goes first: from then on its files are those of an attempt that was never published.
        lease.check()
        store.delete(commit_file(name))
    sizes = _delete_unneeded(store, lease, attempts, needed)
    forget_deletions(store, up_to_generation=lease.generation)
    for folder in ("commit", "lease"):
        store.remove_stale_temporaries(folder, written_before_unix_s=unix_s() - _STALE_S)
    return Removal(
        commits=tuple(removable),
        attempts=tuple(dict.fromkeys(name.split("/")[1] for name in sizes)),
        num_files=len(sizes),
        num_bytes=sum(sizes.values()),
    )


def _check_newest(store: Store, name: str) -> None:
    damage = next(size_damages(store, load(store, name)), None)
    if damage is not None:
        raise StorageError(
            f"The newest commit {name} in {store.location} is not whole: found {damage.found} in {damage.name}, "
            f"expected {damage.expected}. "
            "No older commit was deleted: it may be needed. Look into the storage; `podembed fsck` names all damage."
        )


def _from_between(removable: Iterable[str], kept: set[str], lineage: tuple[str, ...]) -> list[str]:
    """Commits whose successor stays and whose predecessor may: without a record, deleting them looks like losing them
    for a moment.
    """
    oldest = min((at for at in map(parse_commit_name, kept) if at is not None), default=None)
    places = {name: parse_commit_name(name) for name in removable if name in lineage}
    return [name for name, at in places.items() if oldest is not None and at is not None and at > oldest]


def _is_settled(name: str, lineage: tuple[str, ...], lease: Lease) -> bool:
    """Whether no process can still be writing an attempt: it is a commit of the lineage, its generation is over, or its
    step is past.

    The last are attempts whose manifest went while a later commit still needed some of their files.
    """
    parsed = parse_commit_name(name)
    head = parse_commit_name(lease.head) if lease.head else None
    is_past = parsed is not None and head is not None and parsed[1] == lease.generation == head[1] and parsed < head
    return parsed is not None and (name in lineage or parsed[1] < lease.generation or is_past)


def _delete_unneeded(store: Store, lease: Lease, attempts: Iterable[str], needed: set[str]) -> dict[str, int]:
    """Returns name → bytes of the files that went."""
    deleted: dict[str, int] = {}
    for attempt in attempts:
        for name, size_bytes in store.sizes(f"data/{attempt}").items():
            if name in needed:
                continue
            # A newer driver may have gone back to an older commit that needs these files.
            if len(deleted) % _BATCH_FILES == 0:
                lease.check()
            store.delete(name)
            deleted[name] = size_bytes
        store.remove_empty_folders(f"data/{attempt}")
    return deleted
