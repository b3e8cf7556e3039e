"""The code broken on purpose, one protocol rule at a time, to see that the simulation finds it. Each is a context
manager.

A simulation that finds nothing proves something only if it would find these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from podembed.embedding.table.stores.ram_kept import RamPreImages, RamSnapshot
from podembed.orchestrator.commit import checkpoint, claiming, keep, lease, lease_files
from podembed.orchestrator.commit.lease_protocol import DriverState, LeasePhase, after, propose
from podembed.orchestrator.commit.manifest import commit_file
from podembed.orchestrator.driver import background_commit
from podembed.orchestrator.run import claims
from podembed.workers.checkpoint import chunks
from podembed.workers.checkpoint import files as checkpoint_files
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.host.survivors import verification


@contextmanager
def base_before_claim() -> Iterator[None]:
    """The commit to start from is chosen before the generation is claimed."""
    real = claiming.acquire

    def acquire(store: Any, *, choose_base: Any, **options: Any) -> Any:
        early = lease_files.read_head(store)
        return real(store, choose_base=lambda _: early, **options)

    with patch.object(claims, "acquire", acquire):
        yield


@contextmanager
def acknowledge_before_check() -> Iterator[None]:
    """A commit is acknowledged without looking for newer claims, neither before nor after it is published."""

    def publish(self: lease.Lease, name: str, manifest: bytes) -> None:
        state = after(propose(self._state, name), self.store.create_exclusive(commit_file(name), manifest))
        self._state = replace(state, phase=LeasePhase.READY, head=name, pending=None)

    with patch.object(lease.Lease, "publish", publish), patch.object(lease.Lease, "check", lambda self: None):
        yield


@contextmanager
def no_snapshot() -> Iterator[None]:
    """Rows change while they are being saved, and nothing is kept of what they were."""
    real = RamPreImages.keep

    def keep(self: RamPreImages, *told: Any, **options: Any) -> tuple[int, int]:
        return real(self, *told, **(options | {"freezes": False}))

    with patch.object(RamPreImages, "keep", keep):
        yield


@contextmanager
def forgotten_changes() -> Iterator[None]:
    """An incremental commit leaves out the last of the changed rows of each bucket."""
    real = RamSnapshot.changed

    def changed(self: RamSnapshot, start: int, stop: int) -> np.ndarray:
        return real(self, start, stop)[:-1]

    with patch.object(RamSnapshot, "changed", changed):
        yield


@contextmanager
def sizes_unchecked() -> Iterator[None]:
    """A manifest is published without asking whether the files are there."""
    with patch.object(checkpoint, "size_damages", lambda store, manifest: iter(())):
        yield


@contextmanager
def unverified_restore() -> Iterator[None]:
    """What a host reads back is believed: no checksum, no digest."""
    with (
        patch.object(chunks, "_check_checksum", lambda *_: None),
        patch.object(checkpoint_files, "check_digest", lambda table, bucket, values: None),
    ):
        yield


@contextmanager
def deletes_needed_files() -> Iterator[None]:
    """The keep policy forgets that a commit needs files of those before it."""
    real = keep._delete_unneeded

    def delete(store: Any, surviving: Any, attempts: Any, needed: set[str]) -> dict[str, int]:
        return real(store, surviving, attempts, set())

    with patch.object(keep, "_delete_unneeded", delete):
        yield


@contextmanager
def publishes_early() -> Iterator[None]:
    """A commit does not wait for the one before it, which is dropped."""

    def finish(self: background_commit.BackgroundCommits) -> None:
        self._under_way = None

    with patch.object(background_commit.BackgroundCommits, "finish", finish):
        yield


@contextmanager
def fenced_driver_claims_again() -> Iterator[None]:
    """A driver whose workers died claims a new generation without asking whether somebody else has done so
    meanwhile.
    """
    real = claiming.acquire

    def acquire(store: Any, **options: Any) -> Any:
        return real(store, **{**options, "held": 0})

    with patch.object(claims, "acquire", acquire):
        yield


@contextmanager
def base_of_a_newer_generation() -> Iterator[None]:
    """A driver that was held up since its claim takes the base of a newer generation for one that it may start from."""

    def follow(state: DriverState, answer: Any) -> DriverState:
        if state.phase is LeasePhase.READ_BASE:
            return replace(state, phase=LeasePhase.LIST_COMMITS, base=answer)
        if state.phase is LeasePhase.CHOOSE_BASE:
            return replace(state, phase=LeasePhase.CREATE_BASE, head=answer)
        return after(state, answer)

    with patch.object(claiming, "after", follow):
        yield


@contextmanager
def skips_undo() -> Iterator[None]:
    """A host that lives on says that it went back to the commit, and did not."""

    def back_to(self: Undo, commit: str) -> list[np.ndarray] | None:
        return [np.ones(len(table.buckets), bool) for table in self._tables] if commit else None

    with patch.object(Undo, "back_to", back_to):
        yield


@contextmanager
def believes_survivors() -> Iterator[None]:
    """The rows of a host that lives on are not compared with the commit's digests."""
    with patch.object(verification, "has_digest", lambda *_: True):
        yield


@contextmanager
def acknowledges_early() -> Iterator[None]:
    """A host lets go of the last commit as soon as the next one begins to be saved."""
    real = Undo.freeze

    def freeze(self: Undo, commit: str, *, before_failed: bool = False) -> None:
        real(self, commit, before_failed=before_failed)
        self.acknowledge(commit)

    with patch.object(Undo, "freeze", freeze):
        yield


MUTATIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    mutation.__name__: mutation
    for mutation in (
        base_before_claim,
        acknowledge_before_check,
        no_snapshot,
        forgotten_changes,
        sizes_unchecked,
        unverified_restore,
        deletes_needed_files,
        publishes_early,
        fenced_driver_claims_again,
        base_of_a_newer_generation,
        skips_undo,
        believes_survivors,
        acknowledges_early,
    )
}
