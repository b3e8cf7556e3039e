"""The lease on a run: a generation that this driver claimed, and the proof that nobody claimed a newer one.

Carries out the steps of `lease_protocol` on a store. Files: `lease/g<generation>.claim` and `.base.json`, created
exclusively and kept for ever, and `.hb`, a heartbeat that only spares people an accident: whether a driver may commit
never depends on it or on any clock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from podembed.orchestrator.api.errors import EXIT_CONFIGURATION, EXIT_FENCED
from podembed.orchestrator.api.records import decode, encode, read_document
from podembed.orchestrator.commit.lease_files import (
    MAX_LEASE_BYTES,
    BaseLost,
    BaseRecord,
    lease_file,
    read_base,
    read_claims,
    read_commit_names,
    read_head,
    read_lineage,
    read_newest_base,
    read_used_generations,
)
from podembed.orchestrator.commit.lease_protocol import DriverState, Phase, after, is_fenced, propose
from podembed.orchestrator.commit.manifest import commit_file
from podembed.orchestrator.commit.storage_wait import at_once
from podembed.orchestrator.commit.vanished import require_own
from podembed.workers.storage.errors import NameNotFound, StorageError, may_pass
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

HEARTBEAT_EVERY_S = 5.0
HEARTBEAT_FRESH_S = 30.0

__all__ = [
    "HEARTBEAT_EVERY_S",
    "HEARTBEAT_FRESH_S",
    "BaseLost",
    "BaseRecord",
    "Claim",
    "CommitExists",
    "Fenced",
    "Heartbeat",
    "Holder",
    "Lease",
    "PublicationUnsettled",
    "RunIsHeld",
    "acquire",
    "read_base",
    "read_claims",
    "read_commit_names",
    "read_head",
    "read_heartbeat",
    "read_lineage",
    "read_newest_base",
]


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
    """The storage failed while a manifest was published, so that nobody can say whether the commit stands. Until
    `Lease.settle` knows, the lease publishes nothing else.
    """

    def __init__(self, name: str, location: str):
        super().__init__(
            f"Whether commit {name} stands in {location} is unknown: the storage failed while it was published. An "
            "answer was expected: start "
            "the driver again when the storage is well, and it will find out."
        )
        self.name, self.location = name, location


class CommitExists(StorageError):
    """Somebody else made a commit of this generation."""

    may_pass = False


class RunIsHeld(RuntimeError):
    """Another driver was alive on this run a moment ago."""

    exit_code = EXIT_CONFIGURATION

    def __init__(self, holder: Holder, age_s: float, location: str):
        super().__init__(
            f"The run in {location} is held by submission '{holder.submission}', process {holder.process} on "
            f"{holder.hostname}, seen "
            f"{age_s:.0f} s ago. Stop it, or wait until it has been silent for {HEARTBEAT_FRESH_S:.0f} s, or take the "
            "run over "
            "(take_over=True, --take-over)."
        )
        self.holder = holder
        self.age_s = age_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who drives.

    Attributes:
      submission: shared by the attempts of one submitted job; a driver never waits for its own submission.
      machine: tells whether `process` is a number of this machine's process table; empty if that cannot be known.
    """

    submission: str
    hostname: str
    process: int
    machine: str

    @staticmethod
    def current(submission: str) -> Holder:
        return Holder(submission=submission, hostname=socket.gethostname(), process=os.getpid(), machine=_machine())


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Content of a claim. `token` makes it unique, so that a repeated request can recognize its own."""

    generation: int
    holder: Holder
    created_unix_s: float
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Content of a heartbeat."""

    generation: int
    holder: Holder
    written_unix_s: float


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A commit that is being published."""

    state: DriverState
    name: str
    manifest: bytes


class Lease:
    """One generation's right to commit. Made by `acquire`. Mutated: the protocol state and what is unsettled, by
    `publish` and `settle`; the time of the last beat.
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

    def check(self) -> None:
        """Looks for newer claims, and for the claim and the base that this driver wrote.

        Raises:
          Fenced: there is a newer claim.
          RunVanished: claim or base are gone.
        """
        claims = self.require_newest()
        if self._state.phase is Phase.FENCED:
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
        """Makes a manifest the next commit. When this returns, the commit is permanent and may be acknowledged to
        anybody.

        Raises:
          Fenced: a newer driver exists. The commit may or may not be in its lineage; it must not be acknowledged.
          RunVanished: the run's folder is gone, or the claim or the base that this driver wrote. Nobody may rely on the
            commit.
          StorageError, OSError: the storage failed, and the commit was not made; another may be.
          PublicationUnsettled: the storage failed, and whether the commit stands is unknown. The lease publishes
            nothing else before `settle` returned.
        """
        ready = self._state
        state, self._state = propose(ready, name), replace(ready, phase=Phase.FENCED)
        try:
            self._carry_out(_Proposal(state, name, manifest), earlier=False)
        except PublicationUnsettled as error:
            if error.__cause__ is None or not self._is_surely_missing(name):
                raise
            self._state, self._unsettled = ready, None
            raise error.__cause__ from None

    def settle(self) -> None:
        """Asks again whether the commit stands that `publish` could not say it of, and publishes it if it does not.
        When this returns, the commit is permanent.

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
            is_ours = self.store.create_exclusive(commit_file(name), manifest)
            if not is_ours and earlier:
                is_ours = _holds(self.store, commit_file(name), manifest)
            self._confirm(after(state, is_ours), name)
        except (StorageError, OSError) as error:
            if not may_pass(error):
                raise
            self._unsettled = proposal
            raise PublicationUnsettled(name, self.store.location) from error

    def _is_surely_missing(self, name: str) -> bool:
        """Whether a request to create this name, which failed, took no effect and will take none later."""
        if self.store.answers_late:
            return False
        with contextlib.suppress(StorageError, OSError):
            return not self.store.exists(commit_file(name))
        return False

    def _confirm(self, state: DriverState, name: str) -> None:
        if state.phase is Phase.FENCED:
            raise CommitExists(
                f"Commit {name} existed before generation {self.generation} created it, though the generation is ours "
                "alone. Somebody "
                f"wrote into {self.store.location} by hand: look at {commit_file(name)}, then start the driver again."
            )
        claims = read_claims(self.store)
        state = after(state, claims)
        if state.phase is Phase.FENCED:
            raise Fenced(self.generation, max(claims), self.store.location)
        # Whoever removed them may have begun another run here; a manifest alone would be a commit of nothing.
        require_own(self.store, self.own_files)
        self._state = after(state, None)

    def heartbeat(self) -> None:
        """Says that this driver lives. Advisory. May be called as often as one likes; it writes every
        `HEARTBEAT_EVERY_S`.
        """
        now_unix_s = self._unix_s()
        if self._last_beat_unix_s is not None and abs(now_unix_s - self._last_beat_unix_s) < HEARTBEAT_EVERY_S:
            return
        self._last_beat_unix_s = now_unix_s
        beat = Heartbeat(generation=self.generation, holder=self.holder, written_unix_s=now_unix_s)
        self.store.replace(lease_file(self.generation, "hb"), encode(beat))

    def release(self) -> None:
        """Ends the heartbeat, so that the next driver need not wait. The claim stays: generations are never used
        twice.
        """
        self.store.delete(lease_file(self.generation, "hb"))


def acquire(
    store: Store,
    *,
    holder: Holder,
    take_over: bool = False,
    held: int = 0,
    held_files: Mapping[str, bytes] | None = None,
    rebuild: bool = False,
    choose_base: Callable[[str | None], str | None] = lambda newest: newest,
    patiently: Callable[[Callable[[], Any]], Any] = at_once,
    unix_s: Callable[[], float] = time.time,
) -> Lease:
    """Claims the next generation of a run and fixes the commit that it starts from.

    Args:
      take_over: fence a driver of another submission even if its heartbeat is fresh.
      held: the generation that this driver had before, 0 for none. A newer one means that somebody took the run over,
        which a driver that recovers must not undo.
      held_files: `Lease.own_files` of that generation.
      rebuild: go on although the newest base is lost or damaged; see `lease_files.read_newest_base`.
      choose_base: gets the newest commit's name, checks it, and returns it or, if the user allows, an ancestor; raising
        leaves the claim without a base, which changes nothing for later drivers.
      patiently: asks the storage; may ask again if it is away.
      unix_s: the wall clock, for heartbeats and records only.

    Raises:
      RunIsHeld: another submission's driver is alive and `take_over` is not set.
      Fenced: a newer claim appeared meanwhile.
      RunVanished: what this driver wrote for the generation before is gone.
      BaseLost: the newest base cannot be read, and `rebuild` is not set.
    """
    state = DriverState()
    own: dict[str, bytes] = {}
    while state.phase is not Phase.READY:
        generation = state.generation
        match state.phase:
            case Phase.LIST_CLAIMS:
                answer: Any = patiently(partial(read_used_generations, store))
                if held and is_fenced(held, answer):
                    raise Fenced(held, max(answer), store.location)
                # Without them the run would begin again, in an empty folder.
                patiently(partial(require_own, store, held_files or {}))
                if not take_over:
                    patiently(partial(_refuse_if_held, store, answer, holder, unix_s()))
            case Phase.CLAIM:
                claim = Claim(
                    generation=generation, holder=holder, created_unix_s=unix_s(), token=secrets.token_hex(16)
                )
                file, content = lease_file(generation, "claim"), encode(claim)
                answer = patiently(_Creation(store, file, content))
                own = {file: content}
                held, held_files = (generation, own) if answer else (held, held_files)
            case Phase.READ_BASE:
                # It is tried once, so a short outage of the storage may lose it; no generation should be given up for
                # that.
                with contextlib.suppress(StorageError, OSError):
                    Lease(store=store, holder=holder, state=state, unix_s=unix_s).heartbeat()
                with _letting_go(Lease(store=store, holder=holder, state=state, unix_s=unix_s)):
                    answer = patiently(partial(read_newest_base, store, rebuild=rebuild))
            case Phase.LIST_COMMITS:
                answer = patiently(partial(read_commit_names, store))
            case Phase.CHOOSE_BASE:
                with _letting_go(Lease(store=store, holder=holder, state=state, unix_s=unix_s)):
                    answer = patiently(partial(choose_base, state.head))
            case Phase.CREATE_BASE:
                record = BaseRecord(
                    generation=generation, commit=state.head, created_unix_s=unix_s(), token=secrets.token_hex(16)
                )
                file, content = lease_file(generation, "base.json"), encode(record)
                answer = patiently(_Creation(store, file, content))
                own[file] = content
            case Phase.CONFIRM_CLAIM:
                answer = patiently(partial(read_claims, store))
            case _:
                raise Fenced(generation, max(read_claims(store), default=0), store.location)
        state = after(state, answer)
    return Lease(store=store, holder=holder, state=state, unix_s=unix_s, own_files=own)


@contextlib.contextmanager
def _letting_go(lease: Lease) -> Iterator[None]:
    """Ends the heartbeat if the block raises: nobody should wait for a driver that gave up."""
    try:
        yield
    except BaseException:
        # Why it did matters more than that they may have to.
        with contextlib.suppress(StorageError, OSError):
            lease.release()
        raise


class _Creation:
    """A file that is to be created exclusively. Called again after the storage failed, it knows its own file. Mutated:
    how often it was called.
    """

    def __init__(self, store: Store, file: str, data: bytes) -> None:
        self._store, self._file, self._data = store, file, data
        self._calls = itertools.count()

    def __call__(self) -> bool:
        """Whether the file is ours."""
        is_again = next(self._calls) > 0
        is_new = self._store.create_exclusive(self._file, self._data)
        return is_new or (is_again and _holds(self._store, self._file, self._data))


def _holds(store: Store, file: str, data: bytes) -> bool:
    try:
        return read_document(store, file, max_bytes=len(data)) == data
    except DocumentRefused:
        return False


def read_heartbeat(store: Store, generation: int) -> Heartbeat | None:
    """The heartbeat of a generation, or None if there is none that can be read."""
    name = lease_file(generation, "hb")
    try:
        return decode(Heartbeat, name, read_document(store, name, max_bytes=MAX_LEASE_BYTES))
    except (NameNotFound, DocumentRefused):
        # Advisory: a released or torn heartbeat must not stop anybody.
        return None


def _refuse_if_held(store: Store, claims: list[int], holder: Holder, now_unix_s: float) -> None:
    beat = read_heartbeat(store, claims[-1]) if claims else None
    if beat is None or beat.holder.submission == holder.submission:
        return
    # A clock that is ahead of ours makes a heartbeat look young, never old.
    age_s = max(0.0, now_unix_s - beat.written_unix_s)
    if age_s < HEARTBEAT_FRESH_S and not _is_known_dead(beat.holder):
        raise RunIsHeld(beat.holder, age_s, store.location)


def _is_known_dead(holder: Holder) -> bool:
    """Whether the holder ran on this very machine and its process is gone, so that nobody waits after a crash."""
    if not holder.machine or holder.machine != _machine() or holder.process < 1:
        return False
    try:
        os.kill(holder.process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _machine() -> str:
    """This boot and process namespace, or nothing where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
