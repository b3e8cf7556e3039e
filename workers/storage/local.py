"""Files of one folder on a local or mounted disk, reached without ever following a link below its root.

Every path is walked segment by segment from the root with `O_NOFOLLOW`, so a link planted inside a checkpoint leads
nowhere. A write is durable when it returns: the file and each folder that names it are synced. Inside `sync_later` a
thread's writes are durable when `sync` returns, which asks the disk once for many files. What is replaced is advisory
and never synced. Creation of a name is decided by the kernel (`O_EXCL`, hard link), never by looking first. Names
arrive validated; see `storage`.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from podembed.workers.storage.direct import DirectWrites
from podembed.workers.storage.storage_errors import (
    NameNotFound,
    NameTaken,
    NotAFolder,
    NotAPlainFile,
    SyncRefused,
    WrongSize,
)
from podembed.workers.storage.transfer import Buffer, read_all, sync_file, write_all

Answer = TypeVar("Answer")

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe that somebody planted must not wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
"""What mounts answer that have none, such as exFAT, FAT and mounted buckets. EPERM is not about rights here, since the
file is this process's own.
"""
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
# Starts with a dot, so it is no valid name and never listed.
_TEMPORARY = ".tmp-"


@dataclass(slots=True)
class Unsynced:
    """Files that were written and may still be lost with the machine. Mutated by writes inside `sync_later`, and by
    `add`.

    Attributes:
      files: names.
      folders: folders in which a file or a folder was made; the root is "".
      size_bytes: bytes of the files.
      is_hurried: whether the writer rather has its bytes taken at once than on the disk soon.
      rest: called after so many bytes within a large file, and may pause.
    """

    files: list[str] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)
    size_bytes: int = 0
    is_hurried: bool = False
    rest: Callable[[int], None] = lambda num_bytes: None

    def add(self, other: Unsynced) -> None:
        """Takes over what another one notes."""
        self.files += other.files
        self.folders |= other.folders
        self.size_bytes += other.size_bytes


class LocalFiles:
    """The files below `root`, an absolute path. The root itself may be a link: it is the user's own choice."""

    repeats_requests = False

    def __init__(self, root: str, *, direct: DirectWrites | None = None) -> None:
        self.root = root
        # False once the mount has refused a hard link.
        self.creates_exclusively = True
        self._moving = threading.Lock()
        self._thread = threading.local()
        self._direct = direct or DirectWrites()

    @property
    def location(self) -> str:
        return self.root

    def size(self, name: str) -> int:
        with self._open(name) as handle:
            return os.fstat(handle).st_size

    def read(self, name: str, *, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; fewer when the file ends first."""
        with self._open(name) as handle:
            available = max(0, os.fstat(handle).st_size - start)
            data = bytearray(min(length, available))
            filled = read_all(handle, [memoryview(data)], start)
            return bytes(data[:filled])

    def read_into(
        self, name: str, buffers: Sequence[memoryview], *, start: int = 0, size_bytes: int | None = None
    ) -> None:
        """Fills the buffers from `start` of a file that must be `size_bytes` long, or as long as the buffers."""
        wanted = sum(len(buffer) for buffer in buffers)
        expected = wanted if size_bytes is None else size_bytes
        with self._open(name) as handle:
            found = os.fstat(handle).st_size
            if found == expected and (count := read_all(handle, buffers, start)) < wanted:
                found = start + count
        if found != expected:
            raise WrongSize(name, found_bytes=found, expected=f"{expected} bytes were")

    def write_new(self, name: str, buffers: Sequence[Buffer]) -> None:
        *folders, leaf = name.split("/")
        later = self._later
        with self._folder(name, folders, create=True) as folder:
            # Relative to the open folder: a path looked up again might lead elsewhere by now.
            try:
                handle = os.open(leaf, _NEW_FLAGS, 0o666, dir_fd=folder)
            except FileExistsError:
                raise NameTaken(name, self.location) from None
            try:
                if later is None:
                    self._direct.write(handle, buffers)
                else:
                    self._direct.write(handle, buffers, is_hurried=later.is_hurried, rest=later.rest)
                if later is None:
                    self._sync(handle)
            except BaseException:
                # The name is ours alone (O_EXCL), so no other writer's bytes can be removed here.
                os.unlink(leaf, dir_fd=folder)
                raise
            finally:
                os.close(handle)
            # First the file, then the folder that names it: after a crash a name must not stand for missing bytes.
            if later is None:
                self._sync(folder)
            else:
                later.files.append(name)
                later.folders.add("/".join(folders))
                later.size_bytes += sum(memoryview(buffer).nbytes for buffer in buffers)

    @contextmanager
    def sync_later(self, unsynced: Unsynced) -> Iterator[None]:
        """Inside, new files of this thread are noted in `unsynced` instead of synced. Other threads and other calls are
        as ever.
        """
        self._thread.later = unsynced
        try:
            yield
        finally:
            self._thread.later = None

    def sync(self, unsynced: Unsynced) -> None:
        """Makes what was noted durable: every file, then every folder, each once, the deepest first."""
        for name in unsynced.files:
            with self._open(name) as handle:
                self._sync(handle, name)
        for name in sorted(unsynced.folders, key=lambda name: -name.count("/") if name else 1):
            with self._folder(name, name.split("/") if name else [], create=False) as folder:
                self._sync(folder)

    @property
    def _later(self) -> Unsynced | None:
        return getattr(self._thread, "later", None)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Makes a complete, durable file appear under the name, or finds it taken. On a mount without hard links it
        looks first, and only writers of this object are kept apart.
        """

        def move(temporary: str, leaf: str, folder: int) -> bool:
            if self.creates_exclusively:
                try:
                    return _link(temporary, leaf, folder)
                except OSError as error:
                    if error.errno not in NO_HARD_LINKS:
                        raise
                    self.creates_exclusively = False
            # Looking and renaming are two calls, so writers of this object take turns.
            with self._moving:
                try:
                    os.stat(leaf, dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:
                    os.rename(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder)
                    return True
                return False

        return self._publish(name, data, move)

    def replace(self, name: str, data: bytes) -> None:
        """Puts a complete file under the name, instead of what was there. Not durable: a disk that is busy with a save
        would hold the caller up.
        """

        def rename(temporary: str, leaf: str, folder: int) -> bool:
            os.rename(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder)
            return True

        self._publish(name, data, rename, is_durable=False)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Path → bytes of every plain file below the folder; empty if there is none. Links are left out."""
        found: dict[str, int] = {}
        folders = prefix.split("/") if prefix else []
        try:
            with self._folder(prefix, folders, create=False) as folder:
                _collect(folder, prefix, found)
        except NameNotFound:
            return {}
        return found

    def children(self, prefix: str) -> list[str]:
        """Names directly in the folder, files and folders; links are left out."""
        try:
            with (
                self._folder(prefix, prefix.split("/") if prefix else [], create=False) as folder,
                os.scandir(folder) as entries,
            ):
                return [entry.name for entry in entries if not entry.is_symlink()]
        except NameNotFound:
            return []

    def delete(self, name: str) -> None:
        """Removes one file, and the folders that it leaves empty."""
        *folders, leaf = name.split("/")
        with self._folder(name, folders, create=False) as folder:
            try:
                os.unlink(leaf, dir_fd=folder)
            except FileNotFoundError:
                raise NameNotFound(name, self.location) from None
            except IsADirectoryError:
                raise NotAPlainFile(name, self.location, "a folder") from None
        self._remove_empty(folders)

    def remove_empty_folders(self, prefix: str) -> None:
        """Removes a folder and those in it, as far as they hold nothing."""
        *folders, leaf = prefix.split("/")
        with suppress(NameNotFound), self._folder(prefix, folders, create=False) as parent:
            _remove_empty_tree(parent, leaf)

    def remove_stale_temporaries(self, prefix: str, *, written_before_unix_s: float) -> int:
        """Removes what writers that were killed left in a folder; returns how many files. A living writer needs
        seconds, not hours.
        """
        removed = 0
        try:
            with self._folder(prefix, prefix.split("/"), create=False) as folder:
                for leaf in os.listdir(folder):
                    if not leaf.startswith(_TEMPORARY):
                        continue
                    with suppress(FileNotFoundError):
                        if os.stat(leaf, dir_fd=folder, follow_symlinks=False).st_mtime < written_before_unix_s:
                            os.unlink(leaf, dir_fd=folder)
                            removed += 1
        except NameNotFound:
            return 0
        return removed

    def _publish(
        self, name: str, data: bytes, move: Callable[[str, str, int], Answer], *, is_durable: bool = True
    ) -> Answer:
        *folders, leaf = name.split("/")
        temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
        with self._folder(name, folders, create=True) as folder:
            handle = os.open(temporary, _NEW_FLAGS, 0o666, dir_fd=folder)
            try:
                # Durable before it gets its name: whoever finds the name may rely on the whole content.
                try:
                    write_all(handle, [data])
                    if is_durable:
                        self._sync(handle)
                finally:
                    os.close(handle)
                answer = move(temporary, leaf, folder)
            finally:
                _unlink_if_there(temporary, folder)
            # Only now does the name itself survive a crash.
            if is_durable:
                self._sync(folder)
        return answer

    def _sync(self, handle: int, name: str = "") -> None:
        try:
            sync_file(handle, name)
        except OSError as error:
            if error.errno in _NO_SYNC:
                raise SyncRefused(self.root, error.strerror or str(error)) from error
            raise

    def _remove_empty(self, folders: list[str]) -> None:
        while folders:
            with self._folder("/".join(folders), folders[:-1], create=False) as parent:
                try:
                    os.rmdir(folders[-1], dir_fd=parent)
                except OSError as error:
                    # Not empty, or somebody else was faster: both end the clean-up, neither is a fault.
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        return
                    raise
            folders = folders[:-1]

    @contextmanager
    def _folder(self, name: str, segments: Sequence[str], *, create: bool) -> Iterator[int]:
        """Opens the folder reached by the segments, making missing ones durable on the way if asked."""
        if create and not os.path.isdir(self.root):
            try:
                os.makedirs(self.root, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise NotAFolder.at(self.root, _first_file(self.root)) from None
            # A new folder is durable when the folder above it is synced.
            above = os.open(os.path.dirname(self.root), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._sync(above)
            finally:
                os.close(above)
        later = self._later if create else None
        try:
            folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NameNotFound(name, self.location) from None
        except NotADirectoryError:
            raise NotAFolder.at(self.root, _first_file(self.root)) from None
        try:
            for at, segment in enumerate(segments):
                try:
                    inner = self._step(name, folder, segment)
                except FileNotFoundError:
                    if not create:
                        raise NameNotFound(name, self.location) from None
                    self._make_folder(folder, segment, above="/".join(segments[:at]), later=later)
                    inner = self._step(name, folder, segment)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _step(self, name: str, folder: int, segment: str) -> int:
        try:
            return os.open(segment, _FOLDER_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise NotAPlainFile(name, self.location, f"a link or file at '{segment}'") from None
            raise

    def _make_folder(self, parent: int, segment: str, *, above: str, later: Unsynced | None) -> None:
        try:
            os.mkdir(segment, dir_fd=parent)
        except FileExistsError:
            return  # Another writer of the same run made it in between, and syncs it; the next open decides what it is.
        if later is None:
            self._sync(parent)
        else:
            later.folders.add(above)

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        *folders, leaf = name.split("/")
        with self._folder(name, folders, create=False) as folder:
            try:
                handle = os.open(leaf, _READ_FLAGS, dir_fd=folder)
            except FileNotFoundError:
                raise NameNotFound(name, self.location) from None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise NotAPlainFile(name, self.location, "a link or a device") from None
                raise
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise NotAPlainFile(name, self.location, "a folder, a pipe or a device")
            yield handle
        finally:
            os.close(handle)


def _first_file(path: str) -> str:
    """The path or the highest of its parents that is there and is no folder."""
    above = os.path.dirname(path)
    return path if above == path or os.path.isdir(above) else _first_file(above)


def _link(temporary: str, leaf: str, folder: int) -> bool:
    try:
        os.link(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        return True
    except FileExistsError:
        # A network filesystem may repeat a request that had worked and then report the name as taken; the link count
        # tells.
        return os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink == 2


def _unlink_if_there(leaf: str, folder: int) -> None:
    with suppress(FileNotFoundError):  # It was renamed into place.
        os.unlink(leaf, dir_fd=folder)


def _remove_empty_tree(parent: int, leaf: str) -> None:
    """Removes a folder below another one if nothing but empty folders is in it. Links are no folders and stay."""
    try:
        folder = os.open(leaf, _FOLDER_FLAGS, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        with os.scandir(folder) as entries:
            inner = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in inner:
            _remove_empty_tree(folder, name)
    finally:
        os.close(folder)
    with suppress(OSError):  # It holds something.
        os.rmdir(leaf, dir_fd=parent)


def _collect(folder: int, prefix: str, found: dict[str, int]) -> None:
    with os.scandir(folder) as entries:
        listed = list(entries)
    for entry in listed:
        path = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_symlink():
            continue
        if entry.is_dir(follow_symlinks=False):
            try:
                inner = os.open(entry.name, _FOLDER_FLAGS, dir_fd=folder)
            except FileNotFoundError:
                continue  # Deleted while we listed.
            try:
                _collect(inner, path, found)
            finally:
                os.close(inner)
        elif entry.is_file(follow_symlinks=False):
            try:
                found[path] = os.stat(entry.name, dir_fd=folder, follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
