"""One folder of a local disk or object store, addressed by relative names: all that a run reads and writes goes through
here.

Owns name validation, retries and the probe for exclusive creation. Files are written once and never replaced, with the
advisory heartbeat as the one exception. A reader therefore never meets a half-changed file under a name that a commit
refers to. It knows nothing of arrays, manifests or leases. A `Store` holds no open file and no lock and may be used
from several threads.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from podembed.workers.storage.local import LocalFiles, Unsynced
from podembed.workers.storage.remote import RemoteFiles
from podembed.workers.storage.retry import RetryClock, RetryPolicy, call_with_retries
from podembed.workers.storage.storage_errors import (
    AccessRefused,
    NameNotFound,
    NameTaken,
    StorageError,
    StorageFull,
    StoreCannotCreateExclusively,
    SystemRefused,
    UnsafeName,
    WrongSize,
)
from podembed.workers.storage.transfer import Buffer

Answer = TypeVar("Answer")

MAX_NAME_LENGTH = 512
MAX_SEGMENT_LENGTH = 200
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_PROBE_WRITERS = 8


class Files(Protocol):
    """A storage backend. Names arrive validated, errors leave as `StorageError` or as they came from the system.

    Attributes:
      creates_exclusively: whether the storage itself decides who of several writers creates a name, as far as is
        known: a folder's mount shows at its first new name that it has no hard links.
      repeats_requests: whether one call may reach the storage more than once, so that a writer can meet its own file.
    """

    creates_exclusively: bool
    repeats_requests: bool

    @property
    def location(self) -> str: ...
    def size(self, name: str) -> int: ...
    def read(self, name: str, *, start: int, length: int) -> bytes: ...
    def read_into(
        self, name: str, buffers: Sequence[memoryview], *, start: int = 0, size_bytes: int | None = None
    ) -> None: ...
    def write_new(self, name: str, buffers: Sequence[Buffer]) -> None: ...
    def create_exclusive(self, name: str, data: bytes) -> bool: ...
    def replace(self, name: str, data: bytes) -> None: ...
    def sizes(self, prefix: str) -> dict[str, int]: ...
    def children(self, prefix: str) -> Sequence[str]: ...
    def delete(self, name: str) -> None: ...
    def sync_later(self, unsynced: Unsynced) -> AbstractContextManager[None]: ...
    def sync(self, unsynced: Unsynced) -> None: ...
    def remove_empty_folders(self, prefix: str) -> None: ...
    def remove_stale_temporaries(self, prefix: str, *, written_before_unix_s: float) -> int: ...


def validate_name(name: str) -> str:
    """Returns the name if it is safe to join under a root.

    Raises:
      UnsafeName: it is empty, absolute or too long, or one of its segments is not of the strict pattern. That has no
        `..`, scheme, backslash, control character or hidden file.
    """
    if not isinstance(name, str) or not name:
        raise UnsafeName(str(name), "is empty or not text")
    if len(name) > MAX_NAME_LENGTH:
        raise UnsafeName(name, f"has {len(name)} characters, more than {MAX_NAME_LENGTH}")
    for segment in name.split("/"):
        if len(segment) > MAX_SEGMENT_LENGTH:
            raise UnsafeName(name, f"has a segment of {len(segment)} characters, more than {MAX_SEGMENT_LENGTH}")
        if not _SEGMENT.fullmatch(segment):
            raise UnsafeName(name, f"has the segment {segment[:60]!r}")
    return name


def is_safe_name(name: str) -> bool:
    try:
        validate_name(name)
    except UnsafeName:
        return False
    return True


def place(path: str | os.PathLike[str]) -> str:
    """A path or URL that somebody gave, as text, with `~` as the home folder of the user who gave it.

    Hosts have other users and other homes, so this is done where a path comes in, and hosts get what comes out.
    """
    text = os.fspath(path)
    return text if "://" in text else os.path.expanduser(text)


class Store:
    """The files below one URL.

    Args:
      url: a path (`/data/run`, `run`), `file:///data/run`, `memory://run`, or any URL that fsspec opens (`gs://`,
        `s3://`, `abfs://`).
      retry: how long calls insist on errors that usually pass.
      request_timeout_s: the longest that one request to an object store may take.
      waiting: time and chance, replaced in tests.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        retry: RetryPolicy | None = None,
        request_timeout_s: float = 120.0,
        waiting: RetryClock | None = None,
    ):
        self.url = place(url)
        self._files = _open_files(self.url, request_timeout_s)
        self._retry = retry or RetryPolicy()
        self._waiting = waiting or RetryClock()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine, or one that is mounted here."""
        return _local_folder(self.url) is not None

    def through(self, layer: Callable[[Files], Files]) -> Store:
        """The same store with another layer between it and its backend."""
        layered = copy.copy(self)
        layered._files = layer(self._files)
        return layered

    @property
    def location(self) -> str:
        """The root as a person would open it: an absolute path or a URL."""
        return self._files.location

    @property
    def answers_late(self) -> bool:
        """Whether a request that failed here may still take effect later, as with services that are reached over a
        network.
        """
        return self._files.repeats_requests

    def locate(self, name: str) -> str:
        """The full path or URL of a name, for messages and for other tools."""
        return f"{self._files.location.rstrip('/')}/{validate_name(name)}"

    def size(self, name: str) -> int:
        """Bytes stored under the name.

        Raises:
          NameNotFound, NotAPlainFile, UnsafeName, StoreUnavailable.
        """
        return self._run("size of", name, lambda _: self._files.size(name))

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except NameNotFound:
            return False
        return True

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """The whole file, if it is not larger than `max_bytes`.

        Raises:
          WrongSize: it is larger; nothing is allocated for it.
        """
        found = self.size(name)
        if found > max_bytes:
            raise WrongSize(name, found_bytes=found, expected=f"at most {max_bytes} bytes were")
        return self._run("read", name, lambda _: self._files.read(name, start=0, length=found))

    def read_range(self, name: str, *, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`.

        Raises:
          WrongSize: the file ends before `start + length`.
        """
        if start < 0 or length < 0:
            raise ValueError(
                f"start={start}, length={length}; both must be at least 0. Check the offsets before reading."
            )
        found = self.size(name)
        if found < start + length:
            raise WrongSize(name, found_bytes=found, expected=f"at least {start + length} bytes were")
        return self._run("read", name, lambda _: self._files.read(name, start=start, length=length))

    def read_into(
        self, name: str, buffers: Sequence[memoryview], *, start: int = 0, size_bytes: int | None = None
    ) -> None:
        """Fills writable byte views, one after the other, from a file of known length.

        Args:
          start: position in the file of the first view's bytes.
          size_bytes: required size of the file; None for that of all views.

        Raises:
          WrongSize: it has not; the buffers may then be partly changed.
        """
        where = {"start": start, "size_bytes": size_bytes} if size_bytes is not None else {}
        self._run("read", name, lambda _: self._files.read_into(name, buffers, **where))

    def write_new(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Writes one file from byte buffers and returns when it is durable. A local write copies nothing.

        Raises:
          NameTaken: something is there already; it is left as it is. If the call itself may have written it in an
            attempt whose answer was lost, the content decides.
        """

        def attempt(earlier_attempts: int) -> None:
            try:
                self._files.write_new(name, buffers)
            except NameTaken:
                if not self._may_be_ours(earlier_attempts) or not self._holds(name, b"".join(buffers)):
                    raise

        self._run("write", name, attempt)

    def sync_later(self, unsynced: Unsynced) -> AbstractContextManager[None]:
        """A block in which `write_new`, called by this thread, returns before the file is durable and notes it in
        `unsynced`.
        """
        return self._files.sync_later(unsynced)

    def sync(self, unsynced: Unsynced) -> None:
        """Makes what was written inside `sync_later` durable. A failure is final.

        Raises:
          StorageError: the storage lost some of it.
        """
        if not unsynced.files:
            return
        # No second attempt: after a failed fsync the kernel may have dropped the bytes, and the next one succeeds.
        once = dataclasses.replace(self._retry, max_attempts=1)
        what = f"sync '{unsynced.files[0]}' and {len(unsynced.files) - 1} more"
        self._insist(what, lambda _: self._files.sync(unsynced), policy=once)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Creates a small complete file unless the name is taken; of several callers exactly one gets True.

        When an attempt may have worked although its answer was lost, the content tells, so `data` should be unique to
        the caller.
        """

        def attempt(earlier_attempts: int) -> bool:
            if self._files.create_exclusive(name, data):
                return True
            # An earlier request may have created the file although its answer was lost.
            return self._may_be_ours(earlier_attempts) and self._holds(name, data)

        return self._run("create", name, attempt)

    def replace(self, name: str, data: bytes) -> None:
        """Puts new content under a name. For advisory files only: nothing that a commit refers to is ever replaced.

        Tried once: what it is for is written again soon, and no caller should wait for it.
        """
        once = dataclasses.replace(self._retry, max_attempts=1)
        self._run("replace", name, lambda _: self._files.replace(name, data), policy=once)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name → bytes of every file below a folder (all if empty), sorted. Files that no writer of ours would name are
        left out.
        """
        found = self._list(prefix, lambda _: self._files.sizes(prefix))
        return {name: found[name] for name in sorted(found) if is_safe_name(name)}

    def list(self, prefix: str = "") -> Sequence[str]:
        """Names of all files below a folder, sorted."""
        return [*self.sizes(prefix)]

    def children(self, prefix: str = "") -> Sequence[str]:
        """Names directly in a folder, of files and folders, sorted; without the folder's own name."""
        return sorted(filter(is_safe_name, self._list(prefix, lambda _: self._files.children(prefix))))

    def delete(self, name: str) -> None:
        """Removes one file; one that is gone already is not an error, since a repeated request cannot tell."""

        def attempt(_: int) -> None:
            try:
                self._files.delete(name)
            except NameNotFound:
                return

        self._run("delete", name, attempt)

    def delete_folder(self, folder: str) -> None:
        """Removes all files below a folder, and the folder."""
        # Files first: a folder can be removed only when it is empty.
        for name in self.sizes(folder):
            self.delete(name)
        self.remove_empty_folders(folder)

    def remove_empty_folders(self, folder: str) -> None:
        """Removes a folder and those in it, as far as they hold nothing: what writers that were killed had made for
        files to come.
        """
        self._run("delete", folder, lambda _: self._files.remove_empty_folders(folder))

    def remove_stale_temporaries(self, folder: str, *, written_before_unix_s: float) -> int:
        """Removes half-written files that killed writers left in a folder; their names never show elsewhere. Returns
        how many.
        """
        return self._list(
            folder,
            lambda _: self._files.remove_stale_temporaries(folder, written_before_unix_s=written_before_unix_s),
        )

    def probe(self) -> None:
        """Checks with real files that exactly one of several writers can create a name, and that it is listed at once.

        Raises:
          StoreCannotCreateExclusively: the filesystem is not known to decide the race, or did not.
        """
        if not self._files.creates_exclusively:
            raise StoreCannotCreateExclusively(self.location, "offers no exclusive creation through fsspec")
        name = f"probe-{secrets.token_hex(8)}"
        contents = [f"writer {writer} {secrets.token_hex(8)}".encode() for writer in range(_PROBE_WRITERS)]
        with ThreadPoolExecutor(_PROBE_WRITERS) as pool:
            won = [*pool.map(lambda content: self.create_exclusive(name, content), contents)]
        try:
            self._judge_probe(name, contents, won)
        finally:
            self.delete(name)

    def _judge_probe(self, name: str, contents: Sequence[bytes], won: Sequence[bool]) -> None:
        if not self._files.creates_exclusively:
            raise StoreCannotCreateExclusively(
                self.location, "lies on a mount without hard links, by which a local disk decides who creates a name"
            )
        if sum(won) != 1:
            raise StoreCannotCreateExclusively(self.location, f"let {sum(won)} of {len(won)} writers create one name")
        stored = self.read(name, max_bytes=1024)
        if stored != contents[won.index(True)]:
            raise StoreCannotCreateExclusively(self.location, "kept the content of a writer that lost")
        if name not in self.children():
            raise StoreCannotCreateExclusively(self.location, "does not list a file that was just created")

    def _may_be_ours(self, earlier_attempts: int) -> bool:
        """Whether a name that is taken may be taken by this very call."""
        return earlier_attempts > 0 or self._files.repeats_requests

    def _holds(self, name: str, data: bytes) -> bool:
        return self._files.size(name) == len(data) and self._files.read(name, start=0, length=len(data)) == data

    def _run(self, what: str, name: str, call: Callable[[int], Answer], *, policy: RetryPolicy | None = None) -> Answer:
        return self._insist(f"{what} '{validate_name(name)}'", call, policy=policy)

    def _list(self, prefix: str, call: Callable[[int], Answer]) -> Answer:
        return self._insist(f"list '{validate_name(prefix) if prefix else ''}'", call)

    def _insist(self, what: str, call: Callable[[int], Answer], *, policy: RetryPolicy | None = None) -> Answer:
        what = f"{what} in {self.location}"
        try:
            return call_with_retries(call, what=what, policy=policy or self._retry, waiting=self._waiting)
        except PermissionError as error:
            raise AccessRefused.of(what, error) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(what, error) from error
            if isinstance(error, StorageError):
                raise
            # The system's own words name the last segment at best.
            raise SystemRefused.of(what, error) from error


def _open_files(url: str, request_timeout_s: float) -> Files:
    if not url or "\0" in url:
        raise StorageError(
            f"Found {url!r} as the place of files. Expected a path or a URL. Write '.' for the current folder."
        )
    if "::" in url:
        raise StorageError(
            f"'{url}' chains filesystems; one filesystem is expected. Caches may answer with old listings: name the "
            "store itself."
        )
    folder = _local_folder(url)
    if folder is not None:
        return LocalFiles(os.path.abspath(folder))
    return RemoteFiles(url=url, request_timeout_s=request_timeout_s)


def _local_folder(url: str) -> str | None:
    """The path of a folder, None for the URL of another store."""
    if "://" not in url:
        return url
    return url.split("://", 1)[1] if url.startswith(("file://", "local://")) else None
