"""Who drives a run, and whether they live: what stands in claims and heartbeats.

A heartbeat only spares people an accident. Whether a driver may commit never depends on it or on any clock.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from podembed.orchestrator.api.run_errors import EXIT_CONFIGURATION
from podembed.orchestrator.commit.lease_files import MAX_LEASE_BYTES, lease_file
from podembed.workers.storage.records import decode, read_document
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

HEARTBEAT_EVERY_S = 5.0
HEARTBEAT_FRESH_S = 30.0


class RunIsHeld(RuntimeError):
    """Another driver was alive on this run a moment ago."""

    exit_code = EXIT_CONFIGURATION

    def __init__(self, holder: Holder, age_s: float, location: str):
        super().__init__(
            f"The run in {location} is held by submission '{holder.submission}', process {holder.process} on "
            f"{holder.hostname}, seen {age_s:.0f} s ago. Stop it, or wait until it has been silent for "
            f"{HEARTBEAT_FRESH_S:.0f} s, or take the run over (take_over=True, --take-over)."
        )
        self.holder = holder
        self.age_s = age_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The identity of a driver.

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


def read_heartbeat(store: Store, generation: int) -> Heartbeat | None:
    """The heartbeat of a generation, or None if there is none that can be read."""
    name = lease_file(generation, "hb")
    try:
        return decode(Heartbeat, name, read_document(store, name, max_bytes=MAX_LEASE_BYTES))
    except (NameNotFound, DocumentRefused):
        # Advisory: a released or torn heartbeat must not stop anybody.
        return None


def refuse_if_held(store: Store, claims: list[int], holder: Holder, now_unix_s: float) -> None:
    """Raises `RunIsHeld` if the newest claim's driver is of another submission and was alive a moment ago."""
    beat = read_heartbeat(store, claims[-1]) if claims else None
    if beat is None or beat.holder.submission == holder.submission:
        return
    # A clock that is ahead of ours makes a heartbeat look young, never old.
    age_s = max(0.0, now_unix_s - beat.written_unix_s)
    if age_s < HEARTBEAT_FRESH_S and not _is_known_dead(beat.holder):
        raise RunIsHeld(beat.holder, age_s, store.location)


def _is_known_dead(holder: Holder) -> bool:
    """Whether the holder ran on this very machine and its process is gone, so that no driver waits after a crash."""
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
