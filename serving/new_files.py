"""`new_file` and `new_folder`: on this machine, for what commands write. They appear under their names when they are
complete.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.storage.local import NO_HARD_LINKS
from podembed.workers.storage.store import place


@contextmanager
def new_folder(out: str) -> Iterator[str]:
    """A folder to fill; it gets its name when the block ends well, and goes when it does not.

    Raises:
      ConfigurationError: the name is taken, or nothing can be written there.
    """
    folder = os.path.abspath(place(out))
    parent, leaf = os.path.split(folder)
    if os.path.lexists(folder):
        raise taken(out)
    unfinished = os.path.join(parent, f".{leaf[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        os.makedirs(unfinished)
    except OSError as error:
        raise ConfigurationError(
            f"Found no way to write to {parent} ({error.strerror}). Expected a folder that this user may write to. "
            "Choose another --out."
        ) from error
    try:
        yield unfinished
        try:
            # A rename onto a folder with files fails.
            os.rename(unfinished, folder)
        except OSError:
            raise taken(out) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def taken(out: str) -> ConfigurationError:
    """The error for a name that is not free."""
    return ConfigurationError(f"Found something at {out}. Expected a name that is free. Choose another --out.")


@contextmanager
def new_file(path: str | os.PathLike[str], *, force: bool) -> Iterator[BinaryIO]:
    """A file to write; it gets its name when the block ends well, and goes when it does not.

    Raises:
      ConfigurationError: the name is taken and `force` is not set, before or after the block; or nothing can be written
        there.
    """
    path = place(path)
    folder, leaf = os.path.split(os.path.abspath(path))
    _check_target(path, folder, force=force)
    temporary = os.path.join(folder, f".{leaf[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigurationError(
            f"Found no way to write to {folder} ({error.strerror}). Expected a folder that this user may write to. "
            "Choose another --out."
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _give_name(temporary, path, force=force)
        _sync_folder(folder)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _check_target(path: str, folder: str, *, force: bool) -> None:
    if "://" in path:
        raise ConfigurationError(f"Found the URL {path} for --out. Expected a local path. Write here and copy.")
    if not os.path.isdir(folder):
        raise ConfigurationError(f"Found no folder {folder} for --out. Expected an existing one. Create it first.")
    if os.path.isdir(path):
        raise ConfigurationError(f"Found the folder {path} at --out. Expected the name of a file. Add one.")
    if os.path.lexists(path) and not force:
        raise _taken(path)
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        # A rename would put a plain file in its place, /dev/null included.
        raise ConfigurationError(
            f"Found {path} at --out, which is a link, a pipe or a device. Expected a plain file to replace, or a free "
            "name. Choose another --out."
        )


def _give_name(temporary: str, path: str, *, force: bool) -> None:
    if force:
        os.replace(temporary, path)
        return
    try:
        # A link, unlike a rename, never replaces what somebody else has just put there.
        os.link(temporary, path)
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        if os.path.lexists(path):
            raise _taken(path) from None
        os.rename(temporary, path)


def _taken(path: str) -> ConfigurationError:
    return ConfigurationError(
        f"Found a file at {path}. Expected a name that is free. Choose another --out, or replace it with --force."
    )


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
