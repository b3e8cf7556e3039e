"""The storage of a simulated run: one set of files that all processes see, and what can go wrong between a process and
it.

The files are a dictionary, so an operation takes effect at one instant. Each process reaches them through a
`FaultyFiles` of its own, below the real `Store` with its names, retries and probes: it lets time pass, loses answers,
tears writes, and lets faults strike before and after each effect. What is assumed of every storage is never broken:
creation is exclusive, and `lease/` and `commit/` are listed as they are.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from podembed.workers.storage.retry import RetryClock, RetryPolicy
from podembed.workers.storage.storage_errors import NameNotFound, NameTaken, WrongSize
from podembed.workers.storage.store import Store
from podembed.workers.storage.transfer import Buffer
from tests.simulation.world import FakeClock, Process, World

Answer = TypeVar("Answer")

LATENCY_S = (0.002, 0.02)
RETRIES = RetryPolicy(max_attempts=5, first_wait_s=0.1, max_wait_s=2.0, deadline_s=20.0)
# Faults that strike one operation of the kinds named here and are then used up.
ONE_SHOT = {
    "refused": ("read", "write", "create", "replace", "list", "size", "delete"),
    "answer lost": ("write", "create", "delete"),
    "sent twice": ("create",),
    "conflict": ("create",),
    "torn write": ("write",),
    "lost write": ("write",),
    "wrong read": ("read",),
}


class Watcher(Protocol):
    """Who sees what happens to the files, and may let a fault strike there."""

    def reached(self, process: Process, point: str) -> None:
        """A process is about to do something, or has just done it."""
        ...

    def created(self, process: Process, name: str, data: bytes, *, is_whole: bool) -> None: ...

    def deleted(self, process: Process, name: str) -> None: ...


class ServiceConflict(Exception):
    """What an object store answers when two requests for one name meet; to be sent again."""

    code = 409


@dataclass(slots=True)
class Weather:
    """What is wrong with the storage at the moment, for all processes. Times are those of the world."""

    down_until_s: float = 0.0
    full_until_s: float = 0.0
    slow_until_s: float = 0.0
    stale_until_s: float = 0.0
    stale_data: dict[str, int] = field(default_factory=dict)
    armed: list[str] = field(default_factory=list)

    def take(self, operation: str, name: str) -> str | None:
        """The armed fault that strikes this operation, if one does."""
        for kind in self.armed:
            if operation in ONE_SHOT[kind] and (kind != "wrong read" or name.startswith("data/")):
                self.armed.remove(kind)
                return kind
        return None


class SharedFiles:
    """Name → bytes. The truth, of which every process sees its own view."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.weather = Weather()

    def sizes(self, prefix: str) -> dict[str, int]:
        start = f"{prefix}/" if prefix else ""
        return {name: len(data) for name, data in self.files.items() if name.startswith(start)}

    def children(self, prefix: str) -> list[str]:
        start = f"{prefix}/" if prefix else ""
        return list(dict.fromkeys(n[len(start) :].split("/", 1)[0] for n in self.files if n.startswith(start)))


class FaultyFiles:
    """The files as one process reaches them; without a process, as they are."""

    creates_exclusively = True
    location = "simulated://run"

    def __init__(
        self,
        shared: SharedFiles,
        *,
        world: World,
        process: Process | None = None,
        watcher: Watcher | None = None,
        noise: random.Random | None = None,
        repeats_requests: bool = False,
    ) -> None:
        self.repeats_requests = repeats_requests
        self._shared = shared
        self._world = world
        self._process = process
        self._watcher = watcher
        self._noise = noise or random.Random(0)

    def size(self, name: str) -> int:
        return self._do("size", name, lambda _: len(self._named(name)))

    def read(self, name: str, *, start: int, length: int) -> bytes:
        def effect(fault: str | None) -> bytes:
            data = self._named(name)[start : start + length]
            if fault == "wrong read" and data:
                at = self._noise.randrange(len(data))
                return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            return data

        return self._do("read", name, effect)

    def read_into(
        self, name: str, buffers: Sequence[memoryview], *, start: int = 0, size_bytes: int | None = None
    ) -> None:
        wanted = sum(len(buffer) for buffer in buffers)
        expected = wanted if size_bytes is None else size_bytes
        found = len(self._named(name))
        if found != expected:
            raise WrongSize(name, found_bytes=found, expected=f"{expected} bytes were")
        data, at = self.read(name, start=start, length=wanted), 0
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

    def write_new(self, name: str, buffers: Sequence[Buffer]) -> None:
        data = b"".join(bytes(buffer) for buffer in buffers)

        def effect(fault: str | None) -> None:
            if name in self._shared.files:
                raise NameTaken(name, self.location)
            if fault == "lost write":
                return
            self._put(name, data[: len(data) // 2] if fault == "torn write" else data, is_whole=fault != "torn write")

        self._do("write", name, effect)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        def effect(fault: str | None) -> bool:
            # A request that the client repeats by itself may meet its own file.
            if fault == "sent twice" and self.repeats_requests and name not in self._shared.files:
                self._put(name, data)
            if name in self._shared.files:
                return False
            self._put(name, data)
            return True

        return self._do("create", name, effect)

    def replace(self, name: str, data: bytes) -> None:
        self._do("replace", name, lambda _: self._put(name, data))

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._do("list", prefix, lambda _: self._listed(prefix))

    def children(self, prefix: str) -> list[str]:
        def effect(_: str | None) -> list[str]:
            if prefix == "data" and self._is_stale:
                return list(dict.fromkeys(name.split("/")[1] for name in self._shared.weather.stale_data))
            return self._shared.children(prefix)

        return self._do("list", prefix, effect)

    def delete(self, name: str) -> None:
        def effect(_: str | None) -> None:
            if name not in self._shared.files:
                raise NameNotFound(name, self.location)
            del self._shared.files[name]
            if self._process is not None and self._watcher is not None:
                self._watcher.deleted(self._process, name)

        self._do("delete", name, effect)

    @contextmanager
    def sync_later(self, unsynced: object) -> Iterator[None]:
        """What is written is durable."""
        yield

    def sync(self, unsynced: object) -> None: ...

    def remove_empty_folders(self, prefix: str) -> None: ...

    def remove_stale_temporaries(self, prefix: str, *, written_before_unix_s: float) -> int:
        return 0

    # ------------------------------------------------------------------ one operation

    @property
    def _is_stale(self) -> bool:
        return self._process is not None and self._world.now_s < self._shared.weather.stale_until_s

    def _listed(self, prefix: str) -> dict[str, int]:
        if prefix.startswith("data") and self._is_stale and self._process is not None:
            # Of its own generation a driver must see what was written, or it could not check it: a store lists old
            # things late.
            old = self._shared.weather.stale_data
            now = self._shared.sizes(prefix)
            return {name: size for name, size in old.items() if name.startswith(f"{prefix}/")} | now
        return self._shared.sizes(prefix)

    def _named(self, name: str) -> bytes:
        if name not in self._shared.files:
            raise NameNotFound(name, self.location)
        return self._shared.files[name]

    def _put(self, name: str, data: bytes, *, is_whole: bool = True) -> None:
        self._shared.files[name] = data
        if self._process is not None and self._watcher is not None:
            self._watcher.created(self._process, name, data, is_whole=is_whole)

    def _do(self, operation: str, name: str, effect: Callable[[str | None], Answer]) -> Answer:
        """Lets time pass and faults strike around the effect."""
        process, watcher, weather = self._process, self._watcher, self._shared.weather
        if process is None or watcher is None:
            return effect(None)
        point = f"{operation} {kind_of(name)}"
        self._world.touch()
        watcher.reached(process, f"before {point}")
        is_slow = self._world.now_s < weather.slow_until_s
        self._world.sleep(self._noise.uniform(*LATENCY_S) * (100 if is_slow else 1))
        if self._world.now_s < weather.down_until_s:
            self._world.sleep(0.5)
            raise OSError(errno.EIO, "the simulated storage is down")
        if self._world.now_s < weather.full_until_s and operation == "write":
            raise OSError(errno.ENOSPC, "the simulated storage is full")
        fault = weather.take(operation, name) if weather.armed else None
        if fault == "refused":
            raise ConnectionResetError("the simulated storage refused")
        if fault == "conflict":
            raise ServiceConflict("409")
        answer = effect(fault)
        watcher.reached(process, f"after {point}")
        self._world.touch()
        if fault == "answer lost":
            raise TimeoutError("the answer of the simulated storage was lost")
        return answer


def kind_of(name: str) -> str:
    """What a file is for the run: `claim`, `base`, `heartbeat`, `manifest`, `data`; a folder is its own name."""
    if name.endswith(".claim"):
        return "claim"
    if name.endswith(".base.json"):
        return "base"
    if name.endswith(".hb"):
        return "heartbeat"
    folder = name.split("/", 1)[0]
    return "manifest" if folder == "commit" and "/" in name else folder


class SimulatedStore(Store):
    """The real store over simulated files, insisting on a fake clock."""

    def __init__(self, files: FaultyFiles, *, clock: FakeClock, noise: random.Random) -> None:
        self.url = files.location
        self._files: Any = files
        self._retry = RETRIES
        self._waiting = RetryClock(monotonic=clock.monotonic_s, sleep=clock.sleep, random=noise.random)
