"""`FaultyFiles`: a storage that fails as a plan says, around one that does not.

It stands between `Store` and its backend, local or remote. Retries, recognition of own files and checks before a commit
lie above it, and meet the fault as they would meet a real one. A run without a plan has no such layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from podembed.workers.faults.inject import FaultPoints, HttpError, flipped
from podembed.workers.faults.plan import Fault
from podembed.workers.storage.local import Unsynced
from podembed.workers.storage.store import Files, Store
from podembed.workers.storage.transfer import Buffer

LISTING_LAG = 1  # names that a stale listing misses


def faulty_store(url: str, faults: FaultPoints | None) -> Store:
    """A store at a folder or URL, through `with_faults`."""
    return with_faults(Store(url), faults)


def with_faults(store: Store, faults: FaultPoints | None) -> Store:
    """The store itself, or one that fails as the plan says, where it says anything of storage."""
    if faults is None or not faults.knows("storage."):
        return store
    return store.through(lambda files: FaultyFiles(files, faults))


class FaultyFiles:
    """Files that fail.

    The detail of its points is the name of the file or folder. A write that is torn or lost is reported as done. One
    whose answer is lost is done and reported as failed. `precondition_failed` is an exclusive creation that worked, was
    sent again by the client, and came back as taken.
    """

    def __init__(self, files: Files, faults: FaultPoints) -> None:
        self._files = files
        self._faults = faults
        self.creates_exclusively = files.creates_exclusively
        # So that the store looks whether a name that is taken is its own, as it does for services that repeat requests.
        self.repeats_requests = files.repeats_requests or faults.knows("storage.create")

    @property
    def location(self) -> str:
        return self._files.location

    def size(self, name: str) -> int:
        self._pass("storage.size", name)
        return self._files.size(name)

    def read(self, name: str, *, start: int, length: int) -> bytes:
        fault = self._pass("storage.read", name, num_bytes=length)
        data = self._files.read(name, start=start, length=length)
        return data if fault is None else _misread(data, fault)

    def read_into(
        self, name: str, buffers: Sequence[memoryview], *, start: int = 0, size_bytes: int | None = None
    ) -> None:
        fault = self._pass("storage.read", name, num_bytes=sum(map(len, buffers)))
        self._files.read_into(name, buffers, start=start, size_bytes=size_bytes)
        if fault is None:
            return
        if fault.action == "short_read":
            # What a filesystem does that ends early: the rest of the buffer stays as it was.
            buffers[-1][len(buffers[-1]) // 2 :] = bytes(len(buffers[-1]) - len(buffers[-1]) // 2)
        else:
            buffers[0][:] = flipped(bytes(buffers[0]), fault.arguments)

    def write_new(self, name: str, buffers: Sequence[Buffer]) -> None:
        fault = self._pass("storage.write", name, num_bytes=sum(memoryview(buffer).nbytes for buffer in buffers))
        if fault is None:
            self._files.write_new(name, buffers)
        elif fault.action != "lost":
            self._files.write_new(name, [self._spoilt(b"".join(buffers), fault)])
            self._after(fault)
        self._faults.hit("storage.written", detail=name)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        fault = self._pass("storage.create", name, num_bytes=len(data))
        if fault is None:
            is_ours = self._files.create_exclusive(name, data)
        elif fault.action == "lost":
            is_ours = True
        else:
            is_ours = self._files.create_exclusive(name, self._spoilt(data, fault))
            self._after(fault)
            is_ours = is_ours and fault.action != "precondition_failed"
        self._faults.hit("storage.written", detail=name)
        return is_ours

    def replace(self, name: str, data: bytes) -> None:
        self._pass("storage.replace", name)
        self._files.replace(name, data)

    def sizes(self, prefix: str) -> dict[str, int]:
        fault = self._pass("storage.list", prefix)
        found = self._files.sizes(prefix)
        return found if fault is None else {name: found[name] for name in sorted(found)[:-LISTING_LAG]}

    def children(self, prefix: str) -> Sequence[str]:
        fault = self._pass("storage.list", prefix)
        found = self._files.children(prefix)
        return found if fault is None else sorted(found)[:-LISTING_LAG]

    def delete(self, name: str) -> None:
        self._pass("storage.delete", name)
        self._files.delete(name)

    def sync_later(self, unsynced: Unsynced) -> AbstractContextManager[None]:
        return self._files.sync_later(unsynced)

    def sync(self, unsynced: Unsynced) -> None:
        self._files.sync(unsynced)

    def remove_empty_folders(self, prefix: str) -> None:
        self._files.remove_empty_folders(prefix)

    def remove_stale_temporaries(self, prefix: str, *, written_before_unix_s: float) -> int:
        return self._files.remove_stale_temporaries(prefix, written_before_unix_s=written_before_unix_s)

    def _pass(self, point: str, name: str, *, num_bytes: int = 0) -> Fault | None:
        """Passes a point. Errors of a service and slowness are carried out here; what is left is for the caller."""
        fault = self._faults.hit(point, detail=name)
        if fault is None:
            return None
        if fault.action == "http_error":
            raise HttpError(int(fault.arguments.get("code", 503)))
        if fault.action == "throttle":
            self._faults.sleep(num_bytes / float(fault.arguments.get("bytes_per_s", 1e6)))
            return None
        return fault

    def _spoilt(self, data: bytes, fault: Fault) -> bytes:
        if fault.action == "flip":
            return flipped(data, fault.arguments)
        return data[: len(data) // 2] if fault.action in ("torn", "kill_midway") else data

    def _after(self, fault: Fault) -> None:
        if fault.action == "kill_midway":
            self._faults.kill()
        if fault.action == "lost_answer":
            raise ConnectionResetError("injected: the answer of the storage is lost")


def _misread(data: bytes, fault: Fault) -> Any:
    return data[: len(data) // 2] if fault.action == "short_read" else flipped(data, fault.arguments)
