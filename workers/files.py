"""Finding data files by pattern and telling a replaced file from the one that was there before, on any filesystem fsspec knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from workers.input_errors import InputError

# The first of these that a filesystem reports tells a replaced file from the old one; local files and object stores differ here.
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


def locate(patterns: Sequence[str], *, storage_options: dict[str, Any] | None = None) -> list[str]:
    """The files that the patterns match, sorted, each once.

    Returns:
      Paths as fsspec opens them: absolute without a protocol for local files, URLs for others.

    Raises:
      InputError: a pattern matches no file, or names a folder.
    """
    found: set[str] = set()
    for pattern in patterns:
        filesystem, location = fsspec.url_to_fs(pattern, **(storage_options or {}))
        matches = [str(match) for match in filesystem.glob(location)]
        if len(matches) == 1 and filesystem.isdir(matches[0]):
            raise InputError(
                f"Found the folder {pattern} as a path of the data. Expected files. Write {pattern.rstrip('/')}/*, with their ending."
            )
        matches = [match for match in matches if not filesystem.isdir(match)]
        if not matches:
            raise InputError(
                f"Found no file that matches {pattern}. Expected at least one. Check the path and the wildcard."
            )
        is_local = isinstance(filesystem, LocalFileSystem)
        found.update(match if is_local else filesystem.unstrip_protocol(match) for match in matches)
    return sorted(found)


def file_version(path: str, *, storage_options: dict[str, Any] | None = None) -> tuple[int, str]:
    """Size in bytes and whatever tells of the last change, an etag or a time, as text.

    Raises:
      FileNotFoundError: there is no such file.
    """
    filesystem, location = fsspec.url_to_fs(path, **(storage_options or {}))
    # Filesystems of object stores cache listings; a stale one would hide the change that is looked for.
    filesystem.invalidate_cache()
    info = filesystem.info(location)
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "unknown")
    return int(info["size"]), version
