"""`LeaseWatch`: a worker process ends itself when its driver is gone, frozen or cut off, and holds no memory, port or
chip in vain.

One thread a process, a daemon. The actor's own threads say `heard` whenever a call of the driver arrives, which is all
they do here. The watching thread owns everything else and ends with the process. It acts by ending the process at once
(`os._exit`): a working thread may be in the middle of anything. What is not committed does not count. The kernel
then closes the sockets, so that peers notice, and frees memory.

Two signs must be missing for the whole `timeout_s`: calls, and changes of the heartbeat file in the run's folder. The
driver replaces that file every few seconds, whatever it does. Storage is looked at only after calls have stopped, so a
healthy run costs it nothing. A storage that cannot be read is no sign at all, and ends no process. A claim of a newer
generation by another driver ends the process without more waiting. This is convenience, not safety: what an old
generation does is not read by a new one in any case. Only durations are measured, on this machine's monotonic clock and
a look at a time. Neither clocks that differ nor a suspended machine can therefore end a process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from podembed.workers.storage.retry import RetryPolicy
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import unseal

EXIT_FENCED = 86
_MAX_LEASE_BYTES = 1 << 14
_LOOKS = 6  # within the timeout
_LONGEST_PAUSE_S = 5.0
# A look that comes so many pauses late was late itself: the time in between says nothing of the driver.
_LATE_PAUSES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """Whose lease a process follows: that of a generation of the run in a folder; without signs of it for `timeout_s`
    the process ends itself.
    """

    storage_url: str
    generation: int
    timeout_s: float


class LeaseFiles(Protocol):
    """Reads a run's lease. Every method raises `StorageError` or `OSError` where it cannot be read."""

    def heartbeat(self, generation: int) -> bytes:
        """Content of a generation's heartbeat; empty where there is none."""
        ...

    def holder(self, generation: int) -> Any:
        """The driver that claimed a generation; None if none did."""
        ...


class StoredLease:
    """The lease's files in the run's folder. Reads each once: what cannot be read now is looked at again soon."""

    def __init__(self, storage_url: str) -> None:
        self._store = Store(storage_url, retry=RetryPolicy(max_attempts=1), request_timeout_s=10.0)

    def heartbeat(self, generation: int) -> bytes:
        try:
            return self._store.read(f"lease/g{generation:08d}.hb", max_bytes=_MAX_LEASE_BYTES)
        except NameNotFound:
            return b""

    def holder(self, generation: int) -> Any:
        name = f"lease/g{generation:08d}.claim"
        try:
            return unseal(name, self._store.read(name, max_bytes=_MAX_LEASE_BYTES)).get("holder")
        except NameNotFound:
            return None


class LeaseSigns:
    """A worker's knowledge of its driver. Mutable; no thread, no clock, so that tests can let time pass as they like.

    Args:
      timeout_s: how long both signs may be missing.
      follows: whether to go over to the next generation when the same driver claims it, as one does that is part of
        none yet.
    """

    def __init__(self, files: LeaseFiles, *, generation: int, timeout_s: float, follows: bool = False) -> None:
        self._files = files
        self._generation = generation
        self._timeout_s = timeout_s
        self._follows = follows
        self._quiet_s = 0.0
        self._unchanged_s = 0.0
        self._heartbeat: bytes | None = None
        self._holder: Any = None

    @property
    def pause_s(self) -> float:
        """Seconds between two looks."""
        return min(self._timeout_s / _LOOKS, _LONGEST_PAUSE_S)

    def look(self, *, passed_s: float, was_called: bool) -> str | None:
        """Why to end now, or None.

        Args:
          passed_s: since the last look.
          was_called: whether a call of the driver arrived since then.
        """
        if was_called:
            self._quiet_s = self._unchanged_s = 0.0
            self._heartbeat = None
            return None
        # A worker that was stopped itself has not waited for its driver.
        passed_s = min(passed_s, _LATE_PAUSES * self.pause_s)
        self._quiet_s += passed_s
        try:
            newer = self._newer_driver()
            beat = self._files.heartbeat(self._generation)
        except (StorageError, OSError):
            # A storage that is away says nothing about the driver, so the other sign alone never ends a worker.
            return None
        if newer is not None:
            return newer
        if self._heartbeat is None:
            self._heartbeat, self._unchanged_s = beat, passed_s
        elif beat != self._heartbeat:
            self._heartbeat, self._unchanged_s = beat, 0.0
        else:
            self._unchanged_s += passed_s
        if min(self._quiet_s, self._unchanged_s) < self._timeout_s:
            return None
        return f"no call of the driver and no heartbeat of generation {self._generation} for {self._unchanged_s:.0f} s"

    def _newer_driver(self) -> str | None:
        """The reason to end, if another driver has claimed the run.

        When a worker's own driver begins a new generation, a call tells the worker, or leaves it behind. A standby
        worker gets no such call and follows by itself.
        """
        if self._holder is None:
            self._holder = self._files.holder(self._generation)
        newer = self._files.holder(self._generation + 1)
        if newer is not None and newer == self._holder and self._follows:
            self._generation, self._heartbeat = self._generation + 1, None
        if newer is None or newer == self._holder:
            return None
        return f"generation {self._generation + 1} was claimed by another driver"


class LeaseWatch:
    """See the module.

    Args:
      end: function that ends the process when the signs are missing.
      monotonic_s, sleep: time, replaced in tests.
    """

    def __init__(
        self,
        *,
        end: Callable[[str], None] | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._end = end or _end_process
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._calls = 0
        self._signs: LeaseSigns | None = None
        self._thread: threading.Thread | None = None

    def heard(self) -> None:
        """A call of the driver has arrived. From any thread."""
        self._calls += 1

    def begin(self, files: LeaseFiles, *, generation: int, timeout_s: float, follows: bool = False) -> None:
        """Watches from now on; called again, over another generation."""
        self._signs = LeaseSigns(files, generation=generation, timeout_s=timeout_s, follows=follows)
        if self._thread is None:
            # A daemon: it sleeps for most of its life and must not keep a process that is done.
            self._thread = threading.Thread(target=self._watch, name="lease-watch", daemon=True)
            self._thread.start()

    def stand_by(self, terms: LeaseTerms) -> None:
        """Watches over the driver of a generation and of those that it claims after it, until `begin` names the one
        that this process is in.
        """
        files = StoredLease(terms.storage_url)
        self.begin(files, generation=terms.generation, timeout_s=terms.timeout_s, follows=True)

    def _watch(self) -> None:
        heard, looked_s = self._calls, self._monotonic_s()
        while True:
            signs = self._signs
            if signs is None:
                return
            self._sleep(signs.pause_s)
            calls, now_s = self._calls, self._monotonic_s()
            why = signs.look(passed_s=now_s - looked_s, was_called=calls != heard)
            heard, looked_s = calls, now_s
            # A look takes as long as storage does; a call that came meanwhile counts.
            if why is not None and self._calls == heard and signs is self._signs:
                self._end(why)
                return


def _end_process(why: str) -> NoReturn:
    try:
        print(f"podembed: this worker ends itself: {why}.", file=sys.stderr, flush=True)
    finally:
        # Also where nothing can be written: the disk of the logs may be full, and whoever read a pipe is gone with the
        # driver.
        os._exit(EXIT_FENCED)
