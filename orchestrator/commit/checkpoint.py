"""Committing, finding and loading checkpoints of one run.

A checkpoint exists exactly when its manifest does, and counts exactly when the lineage rule reaches it. Hosts write the
files before; here the driver checks that they are all there, publishes the manifest, and learns whether it may
acknowledge the commit. Who may commit is in `lease`, what a whole commit means in `manifest` and `verification`, which
ones stay in `keep`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.lease_files import read_commit_names as _read_commit_names
from podembed.orchestrator.commit.lease_files import read_head, read_lineage
from podembed.orchestrator.commit.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    commit_file,
    from_json,
    parse_commit_name,
    problems,
    to_json,
)
from podembed.orchestrator.commit.run_record import find_run
from podembed.orchestrator.commit.verification import Verification, content_damages, size_damages, verify
from podembed.workers.storage.records import read_document
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, beyond_limits

__all__ = [
    "CommitInfo",
    "CommitRefused",
    "FilesLost",
    "NoLoadableCommit",
    "Verification",
    "commit",
    "list_commits",
    "load",
    "load_head",
    "newest_loadable",
    "verify",
]


class CommitRefused(StorageError):
    """A checkpoint is not complete, so it was not committed; the commit before it stands."""

    may_pass = False

    def __init__(self, name: str, found: str, expected: str):
        super().__init__(
            f"Commit {name} was not made: found {found}; expected {expected}. The commit before it stands; save again, "
            "and check the storage if it happens twice."
        )
        self.name = name
        self.found = found
        self.expected = expected


class FilesLost(CommitRefused):
    """Files that the storage said it had taken are not there, or not whole. Another save may do better.

    Attributes:
      is_of_earlier: some are of an earlier commit, so that only a save of all rows can do better.
    """

    may_pass = True

    def __init__(self, name: str, found: str, expected: str, *, is_of_earlier: bool):
        super().__init__(name, found, expected)
        self.is_of_earlier = is_of_earlier


class NoLoadableCommit(StorageError):
    """No commit of the lineage can be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """One published commit.

    Attributes:
      counts: whether it is in the lineage; others are leftovers that no reader uses.
      is_head: whether it is the one that a resumed run starts from.
      problem: why its manifest cannot be read, or None.
    """

    name: str
    step: int
    generation: int
    counts: bool
    is_head: bool
    manifest: Manifest | None
    problem: str | None


def commit(store: Store, manifest: Manifest, lease: Lease, *, read_back: bool = False) -> str:
    """Publishes a checkpoint whose files have all been written. When this returns, the commit is permanent.

    Args:
      read_back: read every file and compare checksums before publishing, for storage that is not trusted to keep what
        it accepted.

    Returns:
      The commit's name.

    Raises:
      CommitRefused: a bucket is missing or double, the manifest is larger than readers take, or it does not follow the
        lease's head. Nothing was published.
      FilesLost: a file is missing or has another size, or, with `read_back`, other bytes. Nothing was published.
      PublicationUnsettled: see `Lease.publish`.
      Fenced: a newer driver has taken over; the commit must not be acknowledged.
    """
    name = manifest.name
    _check_place(manifest, lease)
    found = problems(manifest)
    if found:
        raise CommitRefused(name, found[0], "a manifest that names every bucket of every array once")
    # Files before the manifest: a manifest that exists is a commit, and all that it names must be there.
    damages = [*size_damages(store, manifest)]
    if not damages and read_back:
        damages = [*content_damages(store, manifest)]
    if damages:
        # A newer driver collects the files of those before it; to be replaced is the answer then.
        lease.check()
        first = damages[0]
        more = f" and {len(damages) - 1} more" if len(damages) > 1 else ""
        is_of_earlier = not all(damage.name.startswith(f"data/{name}/") for damage in damages)
        raise FilesLost(name, f"{first.found} in {first.name}{more}", first.expected, is_of_earlier=is_of_earlier)
    document = to_json(manifest)
    # What no reader takes must not become a commit.
    beyond = beyond_limits(document, max_bytes=MAX_MANIFEST_BYTES)
    if beyond is not None:
        found, expected = beyond
        raise CommitRefused(name, f"a manifest of {found}", f"{expected}; declare fewer tables or slots")
    # As late as possible: the files were verified meanwhile. `publish` looks once more, after the manifest exists.
    lease.check()
    lease.publish(name, document)
    return name


def load(store: Store, name: str) -> Manifest:
    """Reads one commit's manifest, by its name and not from a listing.

    Raises:
      NameNotFound: it does not exist; DocumentRefused: it is damaged or not ours.
    """
    file = commit_file(name)
    return from_json(name, read_document(store, file, max_bytes=MAX_MANIFEST_BYTES))


def load_head(store: Store) -> Manifest | None:
    """The manifest that a resumed run starts from, or None before the first commit.

    Raises:
      NameNotFound, DocumentRefused: the head is missing or damaged. Going back to an ancestor is the user's decision;
        see `newest_loadable`.
    """
    name = read_head(store)
    return load(store, name) if name else None


def newest_loadable(
    store: Store,
    newest: str | None,
    *,
    allow_ancestors: bool,
    on_skip: Callable[[str, str], None],
    passes_vanished: bool = False,
) -> str | None:
    """Checks the commit to start from: its manifest, its run, and that every file is there with its size. Made for
    `claiming.acquire(choose_base=...)`.

    Args:
      newest: the head; None before the first commit.
      allow_ancestors: go back in the lineage if the head is damaged. What was committed after is lost then. Every byte
        is read to find out, since the hosts that would find a changed one cannot choose another commit.
      on_skip: listener for each commit that is passed over, and why.
      passes_vanished: go back behind manifests that are gone, for a driver that recovers: it knows which commit it
        loses, and tells it. Not to the first step, since that is a decision of the user.

    Raises:
      NoLoadableCommit: none is good, or the head is not and ancestors are not allowed.
    """
    if newest is None:
        return None
    record = find_run(store)
    reasons: list[str] = []
    lineage = read_lineage(store, rebuild=allow_ancestors)
    for name in lineage:
        if passes_vanished and not allow_ancestors and not store.exists(commit_file(name)):
            reasons.append(f"{name}: its manifest is gone")
            continue
        reason = _why_not_loadable(store, name, run_id=record.run_id if record else None, reads_all=allow_ancestors)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
        if not allow_ancestors:
            break
        on_skip(name, reason)
    remedy = (
        "Restore the files from a copy, or go back to an older commit (podembed resume --allow-ancestor), which gives "
        "up the steps since."
    )
    if len(reasons) == len(lineage):
        remedy = (
            "No other commit counts, so --allow-ancestor has nothing to go back to. Restore the files from a copy, or "
            "begin a new run."
        )
    raise NoLoadableCommit(
        f"Commit {newest} in {store.location} cannot be loaded ({'; '.join(reasons)[:1000]}). {remedy}"
    )


def list_commits(store: Store) -> tuple[CommitInfo, ...]:
    """All published commits: those that count, newest first, then the others by name."""
    counting = read_lineage(store)
    others = sorted(set(_read_commit_names(store)) - set(counting))
    return tuple(_info(store, name, counting) for name in [*counting, *others])


def _check_place(manifest: Manifest, lease: Lease) -> None:
    if manifest.parent != lease.head or manifest.generation != lease.generation:
        raise CommitRefused(
            manifest.name,
            f"parent {manifest.parent} and generation {manifest.generation}",
            f"parent {lease.head} and generation {lease.generation}, as the lease says",
        )


def _why_not_loadable(store: Store, name: str, *, run_id: str | None, reads_all: bool) -> str | None:
    try:
        manifest = load(store, name)
    except (NameNotFound, DocumentRefused) as error:
        return str(error)
    if run_id is not None and manifest.run_id != run_id:
        return f"it belongs to run {manifest.run_id[:60]}, not to {run_id[:60]}"
    damage = next(size_damages(store, manifest), None)
    if damage is None and reads_all:
        found = content_damages(store, manifest)
        damage = next((one for one in found if not one.spares_rows), None)
    return f"{damage.found} in {damage.name}, expected {damage.expected}" if damage else None


def _info(store: Store, name: str, counting: tuple[str, ...]) -> CommitInfo:
    manifest, problem = None, None
    try:
        manifest = load(store, name)
    except (NameNotFound, DocumentRefused) as error:
        problem = str(error)
    step, generation = parse_commit_name(name) or (0, 0)
    return CommitInfo(
        name=name,
        step=step,
        generation=generation,
        counts=name in counting,
        is_head=name in counting[:1],
        manifest=manifest,
        problem=problem,
    )
