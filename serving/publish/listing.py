"""What people do with versions: list them, go back to one, keep a commit."""

from __future__ import annotations

from datetime import UTC, datetime

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.commit.published import (
    Pointer,
    add_pin,
    add_pointer,
    commit_of_version,
    newest_pointer,
    read_pins,
    recent_pointers,
    remove_pin,
)
from podembed.serving.publish.publisher import Offer, held, publish, require_whole
from podembed.serving.publish.versions import find_version, read_refusals, read_version, version_names
from podembed.workers.storage.store import Store


def render_versions(store: Store) -> str:
    """A line for each version, the one that counts first.

    Raises:
      DocumentRefused: a record is damaged.
    """
    pointers = list(recent_pointers(store))
    refusals = read_refusals(store)
    names = sorted(version_names(store), reverse=True)
    if not names:
        return f"No version in {store.location}. `podembed publish {store.location}` makes one."
    commits = set(read_commit_names(store))
    lines = []
    for name in names:
        version = read_version(store, name)
        numbers = [pointer.number for pointer in pointers if pointer.version == name]
        if pointers and pointers[0].version == name:
            what = "counts"
        elif numbers:
            what = "was offered"
        else:
            what = f"not offered: {refusals[name].reason}" if name in refusals else "not offered"
        metrics = ", ".join(f"{metric} {value:.4f}" for metric, value in sorted(version.metrics.items()))
        gone = "" if version.commit in commits else "; its commit is gone"
        number = f"number {numbers[0]}" if numbers else ""
        made = datetime.fromtimestamp(version.created_unix_s, UTC).strftime("%Y-%m-%d %H:%M")
        lines.append(f"{name}  {made}  {number:<10}  {what}{gone}{f'  ({metrics})' if metrics else ''}")
    return "\n".join(lines)


def roll_back(store: Store, wanted: str | None) -> Pointer:
    """Lets a version count again.

    Args:
      wanted: as `find_version` takes it; None for the one that was offered before.

    Raises:
      ConfigurationError: there is none, it counts already, or its commit is gone.
    """
    current = newest_pointer(store)
    if current is None:
        raise ConfigurationError(
            f"Found no published version in {store.location}. Expected one. Publish a commit: podembed publish "
            f"{store.location}."
        )
    if wanted is None:
        # What was rolled back already is no place to go back to.
        number = read_version(store, current.version).parent
        before = [pointer.version for pointer in recent_pointers(store) if pointer.version != current.version]
        name = number if number in before else next(iter(before), None)
        if name is None:
            raise ConfigurationError(
                f"Found {current.version} alone in {store.location}. Expected a version before it. Publish another one."
            )
    else:
        name = find_version(store, wanted)
    if name == current.version:
        raise ConfigurationError(f"Found {name} as the version that counts. Expected another one. Name it.")
    version = read_version(store, name)
    # The keep policies must not take the commit between the look at it and the pointer.
    with held(store, version.commit, clock=SYSTEM_CLOCK):
        require_whole(store, version)
        return add_pointer(store, version=name, action="rollback", keep=current.keep, unix_s=SYSTEM_CLOCK.wall_s())


def pinned(store: Store) -> str:
    """A line for each pin."""
    lines = [f"{one.commit}  {one.reason}" for one in read_pins(store)]
    return "\n".join(lines) or f"No commit of {store.location} is pinned."


def pin(store: Store, wanted: str, *, reason: str, remove: bool) -> str:
    """Keeps a commit, or leaves it to the keep policies again. Returns what was done.

    Args:
      wanted: name or step of the commit, or a version's name.

    Raises:
      ConfigurationError: there is no such commit, or it is not pinned.
    """
    known = {one.commit for one in read_pins(store)} if remove else set(read_commit_names(store))
    step = int(wanted) if wanted.isdigit() else None
    found = sorted(
        name
        for name in known
        if name in (wanted, commit_of_version(wanted))
        or (step is not None and (parse_commit_name(name) or (-1,))[0] == step)
    )
    if not found:
        raise ConfigurationError(
            f"Found no {'pinned ' if remove else ''}commit {wanted[:80]!r} in {store.location}. Expected one of "
            f"{', '.join(sorted(known)[-8:]) or 'none'}."
        )
    name = found[-1]
    if remove:
        remove_pin(store, name)
        return f"{name} is left to the keep policies"
    add_pin(store, name, reason=reason, unix_s=SYSTEM_CLOCK.wall_s())
    return f"{name} is kept"


def published_now(store: Store, run: str, *, folder: str) -> Offer | None:
    """Publishes the newest commit where nothing was ever published. Returns what it did, or None.

    Raises:
      ConfigurationError: a gate refused what there is; or as `publish`.
      StorageError: as `publish`.
    """
    if newest_pointer(store) is not None:
        return None
    if refusals := read_refusals(store):
        newest = refusals[max(refusals)]
        raise ConfigurationError(
            f"Found no version that is offered in {store.location}; {newest.version} was refused: {newest.reason}. "
            f"Expected one. Train further, or offer one without --require: podembed publish {run}."
        )
    return publish(run, folder=folder)
