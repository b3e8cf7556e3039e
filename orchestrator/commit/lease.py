"""The lease on a run: a generation that this driver claimed, and the proof that no driver claimed a newer one.

`Lease` carries out the steps of `lease_protocol` on a store, once `claiming` has claimed a generation. Files:
`lease/g<generation>.claim` and `.base.json`, created exclusively and kept for ever, and `.hb`, a heartbeat (`holder`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from podembed.orchestrator.api.run_errors import EXIT_FENCED
from podembed.orchestrator.commit.holder import HEARTBEAT_EVERY_S, Heartbeat, Holder
from podembed.orchestrator.commit.lease_files import lease_file, read_claims
from podembed.orchestrator.commit.lease_protocol import DriverState, LeasePhase, after, is_fenced, propose
from podembed.orchestrator.commit.manifest import commit_file, parse_commit_name
from podembed.orchestrator.commit.vanished import require_own
from podembed.workers.storage.records import encode, read_document
from podembed.workers.storage.storage_errors import StorageError, may_pass
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


class Fenced(RuntimeError):
    """A newer driver has taken over the run. Not to be retried."""

    exit_code = EXIT_FENCED

    def __init__(self, generation: int, newest: int, location: str):
        super().__init__(
            f"Generation {newest} of the run in {location} has been claimed; this driver holds generation "
            f"{generation}. The newer driver "
            "owns the run now: this one stops, and what it did not acknowledge does not count."
        )
        self.generation = generation
        self.newest = newest


class PublicationUnsettled(StorageError):
    """The storage failed while a manifest was published, so whether the commit stands is unknown. Until `Lease.settle`
    knows, the lease publishes nothing else.
    """

    def __init__(self, name: str, location: str):
        super().__init__(
            f"Whether commit {name} stands in {location} is unknown: the storage failed while it was published. An "
            "answer was expected: start the driver again when the storage is well, and it will find out."
        )
        self.name, self.location = name, location


class CommitExists(StorageError):
    """Somebody else made a commit of this generation."""

    may_pass = False


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A commit that is being published."""

    state: DriverState
    name: str
    manifest: bytes


class Lease:
    """One generation's right to commit. Made by `claiming.acquire`. Mutated: the protocol state and what is unsettled,
    by `publish` and `settle`; the time of the last beat.
    """

    def __init__(
        self,
        *,
        store: Store,
        holder: Holder,
        state: DriverState,
        unix_s: Callable[[], float],
        own_files: Mapping[str, bytes] | None = None,
    ):
        self.store = store
        self.holder = holder
        self.own_files = dict(own_files or {})
        self._state = state
        self._unix_s = unix_s
        self._last_beat_unix_s: float | None = None
        self._unsettled: _Proposal | None = None

    def __repr__(self) -> str:
        return f"Lease(generation={self.generation}, head={self.head!r}, store={self.store!r})"

    @property
    def generation(self) -> int:
        return self._state.generation

    @property
    def head(self) -> str | None:
        """The last acknowledged commit of this lineage; the base at first."""
        return self._state.head

    @property
    def head_step(self) -> int:
        """The step of the last acknowledged commit, 0 before the first."""
        parsed = parse_commit_name(self.head) if self.head else None
        return parsed[0] if parsed else 0

    def check(self) -> None:
        """Looks for newer claims, and for the claim and the base that this driver wrote.

        Raises:
          Fenced: there is a newer claim.
          RunVanished: claim or base are gone.
        """
        claims = self.require_newest()
        if self._state.phase is LeasePhase.FENCED:
            raise Fenced(self.generation, max(claims, default=0), self.store.location)

    def require_newest(self) -> list[int]:
        """As `check`, and may be called beside a publication that is under way in another thread. Returns the
        generations claimed.

        Raises:
          As `check`.
        """
        claims = read_claims(self.store)
        if is_fenced(self.generation, claims):
            raise Fenced(self.generation, max(claims), self.store.location)
        require_own(self.store, self.own_files)
        return claims

    def publish(self, name: str, manifest: bytes) -> None:
        """Makes a manifest the next commit. When this returns, the commit is permanent and may be acknowledged.

        Raises:
          Fenced: a newer driver exists. The commit may or may not be in its lineage; it must not be acknowledged.
          RunVanished: the run's folder is gone, or the claim or the base that this driver wrote. The commit must not be
            relied on.
          StorageError, OSError: the storage failed, and the commit was not made; another may be.
          PublicationUnsettled: the storage failed, and whether the commit stands is unknown. The lease publishes
            nothing else before `settle` returned.
        """
        # Until the answer is known the lease counts as fenced, so that no second commit can follow an unknown one.
        ready = self._state
        state, self._state = propose(ready, name), replace(ready, phase=LeasePhase.FENCED)
        try:
            self._carry_out(_Proposal(state, name, manifest), earlier=False)
        except PublicationUnsettled as error:
            # If the name surely does not exist, and never will, the failure is an ordinary one: the lease is ready.
            if error.__cause__ is None or not self._is_surely_missing(name):
                raise
            self._state, self._unsettled = ready, None
            raise error.__cause__ from None

    def settle(self) -> None:
        """Asks again whether the unsettled commit stands, and publishes it if it does not. When this returns, the
        commit is permanent.

        Raises:
          PublicationUnsettled: it is still unknown.
          Fenced, RunVanished: as `publish`.
        """
        if self._unsettled is None:
            raise RuntimeError("Found no commit that is unsettled. Expected `publish` to have raised so before.")
        self._carry_out(self._unsettled, earlier=True)

    def _carry_out(self, proposal: _Proposal, *, earlier: bool) -> None:
        """The rest of `publish`. `earlier`: it was tried before, so that the name may be taken by our own manifest."""
        state, name, manifest = proposal.state, proposal.name, proposal.manifest
        self._unsettled = None
        try:
            # Exclusive creation is the commit: from then on the name holds this manifest for ever.
            is_ours = self.store.create_exclusive(commit_file(name), manifest)
            # An earlier request may have taken effect after its answer was lost. Then the name holds our bytes.
            if not is_ours and earlier:
                is_ours = holds(self.store, commit_file(name), manifest)
            self._confirm(after(state, is_ours), name)
        except (StorageError, OSError) as error:
            if not may_pass(error):
                raise
            # The request may have taken effect, or may do so later, so neither answer is known.
            self._unsettled = proposal
            raise PublicationUnsettled(name, self.store.location) from error

    def _is_surely_missing(self, name: str) -> bool:
        """Whether a request to create this name, which failed, took no effect and will take none later."""
        # A remote storage may carry out a request after it reported a failure.
        if self.store.answers_late:
            return False
        with contextlib.suppress(StorageError, OSError):
            return not self.store.exists(commit_file(name))
        return False

    def _confirm(self, state: DriverState, name: str) -> None:
        if state.phase is LeasePhase.FENCED:
            raise CommitExists(
                f"Commit {name} existed before generation {self.generation} created it, though the generation is ours "
                "alone. Somebody "
                f"wrote into {self.store.location} by hand: look at {commit_file(name)}, then start the driver again."
            )
        # After the manifest exists. A newer driver first claims and then lists commits. So it sees this commit, or this
        # driver sees its claim and does not acknowledge.
        claims = read_claims(self.store)
        state = after(state, claims)
        if state.phase is LeasePhase.FENCED:
            raise Fenced(self.generation, max(claims), self.store.location)
        # Before the commit is acknowledged. Whoever removed these files may have begun another run here; a manifest
        # alone would be a commit of nothing.
        require_own(self.store, self.own_files)
        self._state = after(state, None)

    def heartbeat(self) -> None:
        """Writes that this driver lives, at most every `HEARTBEAT_EVERY_S`. Advisory: no commit depends on it."""
        now_unix_s = self._unix_s()
        if self._last_beat_unix_s is not None and abs(now_unix_s - self._last_beat_unix_s) < HEARTBEAT_EVERY_S:
            return
        # Before the write: a storage that is away is asked again after the period, not at every call.
        self._last_beat_unix_s = now_unix_s
        beat = Heartbeat(generation=self.generation, holder=self.holder, written_unix_s=now_unix_s)
        self.store.replace(lease_file(self.generation, "hb"), encode(beat))

    def release(self) -> None:
        """Ends the heartbeat, so that the next driver need not wait. The claim stays: generations are never used
        twice.
        """
        self.store.delete(lease_file(self.generation, "hb"))

    def release_if_possible(self) -> None:
        """As `release`, where the storage takes it: without it the next driver waits, and nothing else."""
        with contextlib.suppress(StorageError, OSError):
            self.release()


def holds(store: Store, file: str, data: bytes) -> bool:
    """Whether a file has exactly this content."""
    try:
        return read_document(store, file, max_bytes=len(data)) == data
    except DocumentRefused:
        return False
