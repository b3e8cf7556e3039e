"""Files of an object store, or of any other filesystem that fsspec knows, below one root.

What the storage must offer beyond fsspec's common calls is exclusive creation. The common call
`pipe_file(mode="create")` looks first and writes then, which lets two writers win. It is trusted only where a
filesystem overrides it with a conditional request. Listings are never
cached: a lease read from a cache protects nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from podembed.workers.storage.local import Unsynced
from podembed.workers.storage.retry import http_code
from podembed.workers.storage.storage_errors import NameNotFound, NameTaken, ServiceRefused, StorageError, WrongSize
from podembed.workers.storage.transfer import Buffer

# MemoryFileSystem keeps its files in a dictionary of the class, so one lock for the process is what decides a race.
_MEMORY_LOCK = threading.Lock()
# The driver's own thread replaces its heartbeat. Held up for longer, it would call no worker, and workers that hear
# nothing for 30 s leave.
LONGEST_REPLACE_S = 5.0
_CONDITIONAL_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})


class RemoteFiles:
    """The files below `root` of an fsspec filesystem. Names arrive validated; see `storage`."""

    def __init__(self, *, url: str, request_timeout_s: float):
        try:
            self._filesystem, self.root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise StorageError(
                f"'{url}' cannot be opened: {error}. A path, or a URL of a filesystem that is installed, is expected. "
                "For s3:// install podembed[s3], for gs:// podembed[gcs]."
            ) from error
        self.root = self.root.rstrip("/")
        self._request_timeout_s = request_timeout_s
        self.location = url
        self._exclusive_options = _exclusive_options(self._filesystem)
        self.creates_exclusively = self._exclusive_options is not None
        # Clients of services send a request again when its answer is lost, and do not tell.
        self.repeats_requests = isinstance(self._filesystem, AsyncFileSystem)

    def size(self, name: str) -> int:
        return int(self._named(name, lambda: self._call("info", self._path(name)))["size"])

    def read(self, name: str, *, start: int, length: int) -> bytes:
        """`length` bytes from `start`, which the caller knows to be there; fewer if the file was changed meanwhile."""
        if length == 0:
            # A range without bytes cannot be requested; the file must still be there.
            self.size(name)
            return b""
        return self._named(name, lambda: self._call("cat_file", self._path(name), start=start, end=start + length))

    def read_into(
        self, name: str, buffers: Sequence[memoryview], *, start: int = 0, size_bytes: int | None = None
    ) -> None:
        """Fills the buffers from `start` of a file that must be `size_bytes` long, or as long as the buffers."""
        wanted = sum(len(buffer) for buffer in buffers)
        expected = wanted if size_bytes is None else size_bytes
        found = self.size(name)
        data = self.read(name, start=start, length=wanted) if found == expected else b""
        if len(data) != wanted:
            raise WrongSize(name, found_bytes=found, expected=f"{expected} bytes were")
        at = 0
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

    def write_new(self, name: str, buffers: Sequence[Buffer]) -> None:
        # One request needs one contiguous body; this copy is what an object store costs over a local disk.
        if not self._create(name, b"".join(buffers)):
            raise NameTaken(name, self.location)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Makes a complete file appear under the name, or finds it taken."""
        return self._create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Puts a complete file under the name, instead of what was there."""
        path = self._path(name)
        self._make_folder(path)
        self._call("pipe_file", path, data, within_s=min(self._request_timeout_s, LONGEST_REPLACE_S))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Path → bytes of every file below the folder; empty if there is none."""
        # Clients keep listings, and other processes write here.
        self._filesystem.invalidate_cache()
        try:
            details = self._call("find", self._path(prefix), detail=True)
        except FileNotFoundError:
            return {}
        return {self._name(path): int(entry["size"]) for path, entry in details.items() if entry["type"] == "file"}

    def children(self, prefix: str) -> list[str]:
        """Names directly in the folder, files and folders."""
        self._filesystem.invalidate_cache()
        try:
            entries = self._call("ls", self._path(prefix), detail=False)
        except FileNotFoundError:
            return []
        names = [self._name(entry.rstrip("/")) for entry in entries]
        return [name.rsplit("/", 1)[-1] for name in names if name != prefix]

    def delete(self, name: str) -> None:
        # Services take the deletion of a missing object for done, so only a look tells.
        self._named(name, lambda: self._call("info", self._path(name)))
        self._named(name, lambda: self._call("rm_file", self._path(name)))

    @contextmanager
    def sync_later(self, unsynced: Unsynced) -> Iterator[None]:
        """An object is durable when its request is answered, so nothing is left for later."""
        yield

    def sync(self, unsynced: Unsynced) -> None:
        """Does nothing; see `sync_later`."""

    def remove_empty_folders(self, prefix: str) -> None:
        """Folders are parts of names and go with the files; where they are things of their own they may stay."""

    def remove_stale_temporaries(self, prefix: str, *, written_before_unix_s: float) -> int:
        """An object appears whole or not at all, so there is never anything to remove."""
        return 0

    def _create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        if isinstance(self._filesystem, MemoryFileSystem):
            # Shared by all stores of this process, as is the memory.
            with _MEMORY_LOCK:
                return self._look_then_write(path, data)
        if self._exclusive_options is None:
            return self._look_then_write(path, data)
        try:
            self._call("pipe_file", path, data, **self._exclusive_options)
        except FileExistsError:
            return False
        except Exception as error:
            # Some versions let the service's own refusal through: 412 is "precondition failed".
            if http_code(error) == 412 or "PreconditionFailed" in str(error):
                return False
            raise
        return True

    def _look_then_write(self, path: str, data: bytes) -> bool:
        self._filesystem.invalidate_cache()
        if self._call("exists", path):
            return False
        self._make_folder(path)
        self._call("pipe_file", path, data)
        return True

    def _make_folder(self, path: str) -> None:
        """Makes the folder of a file where folders are things of their own; in object stores and memory they are parts
        of names.
        """
        if self._exclusive_options is None:
            self._call("makedirs", path.rpartition("/")[0], exist_ok=True)

    def _call(self, method: str, *arguments: Any, within_s: float | None = None, **options: Any) -> Any:
        """Calls the filesystem; asynchronous ones with a deadline for the request, that of all requests if none is
        given.

        Raises:
          OSError: as the filesystem raised it, or a `ConnectionError` for a client's own kind of lost connection.
          ServiceRefused: anything else that the client raised.
        """
        try:
            if isinstance(self._filesystem, AsyncFileSystem) and not self._filesystem.asynchronous:
                coroutine = getattr(self._filesystem, f"_{method}")
                timeout_s = self._request_timeout_s if within_s is None else within_s
                return sync(self._filesystem.loop, coroutine, *arguments, timeout=timeout_s, **options)
            return getattr(self._filesystem, method)(*arguments, **options)
        except (OSError, StorageError):
            raise
        except Exception as error:
            if _is_lost_connection(error):
                raise ConnectionError(str(error)) from error
            if http_code(error) is not None:
                raise
            raise ServiceRefused(self.location, error) from error

    def _named(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FileNotFoundError:
            raise NameNotFound(name, self.location) from None

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _name(self, path: str) -> str:
        return path.lstrip("/").removeprefix(self.root.lstrip("/")).lstrip("/")


def _is_lost_connection(error: Exception) -> bool:
    """Whether a client library's own exception says that the service was not reached. They share names, not a base
    class.
    """
    return any(kind.__name__.endswith(("ConnectionError", "TimeoutError")) for kind in type(error).__mro__)


def _exclusive_options(filesystem: AbstractFileSystem) -> dict[str, Any] | None:
    """Options that make the service refuse an existing name in `pipe_file`; None where it has none.

    For memory our own lock decides. Others must be a known service whose filesystem has its own asynchronous
    `_pipe_file`: s3fs and gcsfs take `mode="create"` (If-None-Match, ifGenerationMatch=0), adlfs takes
    `overwrite=False`.
    """
    if isinstance(filesystem, MemoryFileSystem):
        return {}
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    method = getattr(type(filesystem), "_pipe_file", None)
    if not protocols & _CONDITIONAL_PROTOCOLS or method in (None, getattr(AsyncFileSystem, "_pipe_file", None)):
        return None
    parameters = inspect.signature(method).parameters
    options = {"mode": {"mode": "create"}, "overwrite": {"overwrite": False}}
    return next((option for name, option in options.items() if name in parameters), None)
