"""Data files on any filesystem fsspec knows: found by pattern, told from a replaced one, and read by ranges.

Requests to a store that fail with errors which usually pass are repeated with growing, random pauses until
`DATA_RETRIES` gives up. Each has a deadline of its own where the filesystem is an asynchronous one. Nothing of a store
is cached.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import io
import logging
import os
import re
import stat
from collections.abc import Sequence
from typing import IO, Any, cast

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from podembed.workers.data.input_errors import InputError
from podembed.workers.storage.retry import RetryPolicy, call_with_retries
from podembed.workers.storage.storage_errors import StorageError

DATA_RETRIES = RetryPolicy(max_attempts=12, deadline_s=120.0)
REQUEST_TIMEOUT_S = 60.0

# The extra that brings the filesystem of a protocol.
_EXTRAS = {"s3": ("s3", "s3a"), "gcs": ("gs", "gcs")}
_MAGIC = re.compile(r"[*?[]")
# Where Ray unpacks the working folder of a job, on each machine that the job comes to and when it comes there. So times
# of equal files differ. Ray takes no more than some hundred megabytes, which are read in a second.
_UNPACKED_BY_RAY = "/runtime_resources/working_dir_files/"
_logger = logging.getLogger(__name__)
# The first of these that a filesystem reports tells a replaced file from the old one; local files and object stores
# differ here.
_VERSION_KEYS = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "updated", "created")


def one_line(error: BaseException) -> str:
    """The words of an error of a library, some of which break lines."""
    return " ".join(str(error).split())


def unreadable(path: str, error: BaseException) -> InputError:
    """A data file that the system or the store does not let this process read, in one sentence."""
    if isinstance(error, OSError) and error.errno is not None:
        why = os.strerror(error.errno)
    else:
        why = f"{type(error).__name__}: {one_line(error)}"
    remedy = "Mend what the system says, then start or resume the run"
    if isinstance(error, PermissionError):
        remedy = (
            "Give the user of this program the right to read it and to enter its folders, on every host, then start or "
            "resume the run"
        )
    return InputError(f"Found {path}, which cannot be read ({why}). Expected a readable file of the data. {remedy}.")


def require_plain(path: str, mode: int) -> None:
    """Refuses what is no file with a beginning and an end. Data is read anywhere in it and more than once, and a pipe
    would wait for ever.

    Args:
      mode: `st_mode` of what stands at the path, links followed.

    Raises:
      InputError: it is a folder, a pipe, a socket or a device.
    """
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    raise InputError(
        f"Found the {kinds.get(stat.S_IFMT(mode), 'device')} {path} as a file of the data. Expected a plain file, "
        "since it is read anywhere and more than once. Write its content to a file, or leave it out."
    )


def _is_plain_path(path: str) -> bool:
    """Whether text is a path of this machine and no URL. `a::b.csv` is a file name unless `a` is a protocol of fsspec,
    which would chain the two.
    """
    first, chain, _ = path.partition("::")
    return "://" not in path and not (chain and first in fsspec.available_protocols())


def filesystem_of(path: str) -> tuple[AbstractFileSystem, str]:
    """The filesystem of a path or URL, and how that calls it.

    Raises:
      InputError: nothing that is installed opens such URLs.
    """
    if "::" in path and _is_plain_path(path):
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    try:
        return fsspec.url_to_fs(path)
    except (ImportError, ValueError) as error:
        protocol = path.partition("://")[0]
        extra = next((extra for extra, names in _EXTRAS.items() if protocol in names), None)
        remedy = (
            f"Install podembed[{extra}]" if extra else "Correct the URL, or install the filesystem that fsspec names"
        )
        raise InputError(
            f"Found {path}, which nothing that is installed can open ({error}). Expected a local path, or a URL such "
            f"as s3:// or gs:// with its extra installed. {remedy}."
        ) from error


def locate(patterns: Sequence[str]) -> list[str]:
    """The files that the patterns match, sorted, each once.

    Files and folders whose names begin with `_` or `.` are what other programs keep beside their data: unfinished
    parts, checksums, summaries. They are left out as Spark and Arrow leave them out: below the part of a pattern that
    has no wildcard, unless the pattern writes that first character itself. `_year=2024` is a folder of data. One line
    of the log says how many were left out.

    Returns:
      Paths as fsspec opens them: absolute without a protocol for local files, URLs for others.

    Raises:
      InputError: a pattern matches no file, or names a folder.
      StoreUnavailable: the store did not answer.
    """
    found: set[str] = set()
    for pattern in patterns:
        filesystem, location = filesystem_of(pattern)
        filesystem.invalidate_cache()
        matches = _matches(filesystem, location)
        if len(matches) == 1 and matches[0][1]:
            raise InputError(
                f"Found the folder {pattern} as a path of the data. Expected files. Write {pattern.rstrip('/')}/*, "
                "with their ending."
            )
        files = [path for path, is_folder in matches if not is_folder]
        paths = [path for path in files if not _is_hidden(path, location)]
        hidden = sorted(set(files) - set(paths))
        if not paths:
            besides = (
                f" but {len(hidden)} whose names begin with _ or ., such as {hidden[0]}, which are left out unless the "
                "pattern writes that character"
                if hidden
                else ""
            )
            raise InputError(
                f"Found no file that matches {pattern}{besides}. Expected at least one. Check the path and the "
                "wildcard."
            )
        if hidden:
            _logger.warning(
                "Left out %d of %d files that match %s, since names that begin with _ or . are not data, such as %s. "
                "A pattern that writes this character takes them.",
                len(hidden),
                len(files),
                pattern,
                hidden[0],
            )
        is_local = isinstance(filesystem, LocalFileSystem)
        found.update(match if is_local else filesystem.unstrip_protocol(match) for match in paths)
    return sorted(found)


def file_version(path: str) -> tuple[int, str]:
    """Size in bytes and whatever tells of the last change, an etag or a time, as text. In a working folder that Ray
    unpacked it is a digest of the content.

    Raises:
      FileNotFoundError: there is no such file.
      InputError: it is no plain file, or may not be read.
      StoreUnavailable: the store did not answer.
    """
    if _is_plain_path(path):
        # Of what a link leads to: a file that is rewritten behind one is another file. And in a fiftieth of the time.
        try:
            found = call_with_retries(lambda _: os.stat(path), what=f"stat {path}", policy=DATA_RETRIES)
            require_plain(path, found.st_mode)
            if _UNPACKED_BY_RAY in path:
                return found.st_size, _content_version(path, found.st_mtime_ns, found.st_size)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(path, error) from error
        return found.st_size, str(found.st_mtime)
    filesystem, location = filesystem_of(path)
    # Filesystems of object stores cache listings; a stale one would hide the change that is looked for.
    filesystem.invalidate_cache()
    info = _insist(filesystem, "info", location)
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "unknown")
    return int(info["size"]), version


@functools.lru_cache(maxsize=1024)
def _content_version(path: str, mtime_ns: int, size_bytes: int) -> str:
    """Digest of a local file, which is read again when its time or size is another one."""
    with _open_plain(path) as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"


def local_path(path: str) -> str | None:
    """The path on this machine's disk, or None for a file elsewhere."""
    filesystem, location = filesystem_of(path)
    return location if isinstance(filesystem, LocalFileSystem) else None


def open_ranges(path: str) -> IO[bytes]:
    """Opens a file for reading anywhere in it: as it is on the local disk, by requests for ranges elsewhere.

    Raises:
      InputError: there is no such file, it is no plain one, or may not be read.
      StoreUnavailable: the store did not answer.
    """
    try:
        location = local_path(path)
        if location is not None:
            return _open_plain(location)
        return cast(IO[bytes], io.BufferedReader(RangedFile(path), 1 << 20))
    except FileNotFoundError as error:
        raise InputError(
            f"Found no file {path}. Expected a file of the data. Restore it, or correct the path."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _open_plain(path: str) -> io.BufferedReader:
    # A pipe without a writer would otherwise hold the opening up; for a plain file the flag means nothing.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_plain(path, os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_whole(path: str) -> bytes:
    """All bytes of a file.

    Raises:
      As `open_ranges`.
    """
    with open_ranges(path) as file:
        return file.read()


class RangedFile(io.RawIOBase):
    """A file of a store, read by one request for each range; what mutates is the position. One thread at a time."""

    def __init__(self, path: str) -> None:
        """Asks for the size.

        Raises:
          FileNotFoundError, StoreUnavailable.
        """
        super().__init__()
        self._path = path
        self._filesystem, self._location = filesystem_of(path)
        self._size_bytes, _ = file_version(path)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer as far as the file reaches.

        Raises:
          InputError: the store gave fewer bytes than the file has.
          StoreUnavailable: it did not answer.
        """
        target = memoryview(buffer).cast("B")
        start = self._position
        stop = min(self._size_bytes, start + len(target))
        if start >= stop:
            return 0
        data = _insist(self._filesystem, "cat_file", self._location, start=start, end=stop)
        if len(data) != stop - start:
            raise InputError(
                f"Found {len(data)} bytes at {start} of {self._path}. Expected {stop - start}. The file changed while "
                "it was read: restore it."
            )
        target[: len(data)] = data
        self._position = stop
        return len(data)


def _matches(filesystem: AbstractFileSystem, location: str) -> list[tuple[str, bool]]:
    """What matches a pattern: paths, and whether each is a folder.

    fsspec's own `glob` takes a folder that cannot be listed for an empty one, so an ailing store would change the data
    without a word.
    """
    if "**" in location:
        # Filesystems with their own way to find files do not know the option, and raise anyway.
        find = getattr(type(filesystem), "_find", None) or type(filesystem).find
        options = {"on_error": "raise"} if find in (AbstractFileSystem.find, AsyncFileSystem._find) else {}
        found = _insist(filesystem, "glob", location, detail=True, **options)
        return [(path, entry["type"] == "directory") for path, entry in found.items()]
    if not _MAGIC.search(location) or "[" in location:
        # A file whose name has brackets, as downloads number theirs, is meant by its name before any pattern is.
        try:
            return [(location, _insist(filesystem, "info", location)["type"] == "directory")]
        except (FileNotFoundError, NotADirectoryError):
            if not _MAGIC.search(location):
                return []
    parent, _, pattern = location.rpartition("/")
    folders = (
        [folder for folder, is_folder in _matches(filesystem, parent) if is_folder]
        if _MAGIC.search(parent)
        else [parent]
    )
    matches = []
    for folder in folders:
        try:
            entries = _insist(filesystem, "ls", folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            path = str(entry["name"]).rstrip("/")
            above, _, name = path.rpartition("/")
            # Some filesystems list a folder, or a file that was requested as a folder, among its own entries.
            if above.strip("/") == folder.strip("/") and fnmatch.fnmatchcase(name, pattern):
                matches.append((path, entry["type"] == "directory"))
    return matches


def _is_hidden(path: str, pattern: str) -> bool:
    """Whether a path has a hidden name below the part of the pattern that has no wildcard."""
    names = pattern.split("/")
    first = next((at for at, name in enumerate(names) if _MAGIC.search(name)), len(names))
    written = [name for name in names[first:] if name.startswith(("_", "."))]
    return any(
        (part.startswith(".") or (part.startswith("_") and "=" not in part))
        and not any(fnmatch.fnmatchcase(part, name) for name in written)
        for part in path.split("/")[first:]
    )


def _insist(filesystem: AbstractFileSystem, method: str, location: str, **options: Any) -> Any:
    """One request, repeated while its error may pass; asynchronous filesystems answer it within a deadline."""

    def call(_: int) -> Any:
        if isinstance(filesystem, AsyncFileSystem) and not filesystem.asynchronous:
            coroutine = getattr(filesystem, f"_{method}")
            return sync(filesystem.loop, coroutine, location, timeout=REQUEST_TIMEOUT_S, **options)
        return getattr(filesystem, method)(location, **options)

    url = location if isinstance(filesystem, LocalFileSystem) else filesystem.unstrip_protocol(location)
    try:
        return call_with_retries(call, what=f"{method} {url}", policy=DATA_RETRIES)
    except (FileNotFoundError, NotADirectoryError, InputError, StorageError):
        raise
    except Exception as error:  # clients of stores have types of their own, such as for missing credentials
        raise unreadable(url, error) from error
