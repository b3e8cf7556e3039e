"""A folder that is either complete or not there: how prepared data sets are written once and then only read.

A set is written into a temporary sibling folder, its report is written last as `COMPLETE.json`, and one rename puts the
folder in place. Whoever finds the folder with its report can trust every file in it; whoever loses the race of two
writers finds the winner's folder. A writer that must survive its own death keeps a temporary folder of its own and
calls `finish`. Local folders only: a rename of a folder is not atomic in an object store.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPORT_NAME = "COMPLETE.json"


class FolderError(RuntimeError):
    """A prepared folder is not what its report says, or its place is taken by something else."""


def read_report(folder: Path) -> dict[str, Any] | None:
    """The report of a complete folder, or None if there is no folder or an empty one.

    Raises:
      FolderError: the folder is there without a readable report, this user may not look, or a listed file is missing or
      of another size.
    """
    try:
        return _read_report(folder)
    except PermissionError as error:
        raise FolderError(
            f"Found the folder {folder}, which may not be read ({error.strerror}: {error.filename}). Expected one that "
            "this program's user may enter, with readable files. Give that user the right to, or choose another folder."
        ) from error


def _read_report(folder: Path) -> dict[str, Any] | None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not folder.is_dir():
        raise FolderError(
            f"Found a file in the place of the folder {folder}. Expected a folder, or nothing. Choose another name."
        )
    try:
        report = json.loads((folder / REPORT_NAME).read_text())
        sizes = {str(name): int(size) for name, size in report["file_bytes"].items()}
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FolderError(
            f"Found the folder {folder} without a readable {REPORT_NAME} ({error!r}). Expected none, an empty one, or "
            "one that was prepared to its end. Choose another name; or remove it, if nothing in it is needed."
        ) from error
    for name, size_bytes in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size_bytes:
            raise FolderError(
                f"Found {path} with {found} bytes. Expected {size_bytes}, as {REPORT_NAME} says. Remove {folder} to "
                "have it prepared again."
            )
    return report


def create_once(folder: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Fills a folder with `write` and puts it in place, or takes the one that is already there.

    Args:
      folder: place of the complete folder; its parents are created.
      write: writes the files into the empty folder it is given and returns what to report, ready for JSON.

    Returns:
      The report, with `file_bytes` (name to size of every file) added.

    Raises:
      FolderError: something incomplete is in the way, see `read_report`; or there can be no folder.
    """
    present = read_report(folder)
    if present is not None:
        return present
    unfinished = folder.parent / f".{folder.name}.unfinished-{uuid.uuid4().hex[:12]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
    except OSError as error:
        raise FolderError(
            f"Found no folder {folder}, and none can be made there ({error.strerror}: {error.filename}). Expected a "
            "place that this program's user may write to. Give that user the right to, or choose another folder."
        ) from error
    try:
        return finish(unfinished, folder, write(unfinished))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def finish(unfinished: Path, folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Completes a filled folder and puts it in place.

    Args:
      unfinished: folder with all its files, on the filesystem of `folder`; gone afterwards, unless another writer was
        faster.

    Returns:
      The report, with `file_bytes` added, of the folder that is in place.

    Raises:
      FolderError: something incomplete is in the way, see `read_report`.
    """
    report_path = unfinished / REPORT_NAME
    files = sorted(path for path in unfinished.rglob("*") if path.is_file() and path != report_path)
    sizes = {path.relative_to(unfinished).as_posix(): path.stat().st_size for path in files}
    # The report comes last: a folder with a report is complete.
    write_durably(report_path, json.dumps(report | {"file_bytes": sizes}, indent=1))
    _put_in_place(unfinished, folder)
    written = read_report(folder)
    if written is None:
        raise FolderError(
            f"Found {folder} gone right after it was written. Expected it to stay. Look for who removes it."
        )
    return written


def _put_in_place(unfinished: Path, folder: Path) -> None:
    try:
        os.rename(unfinished, folder)
    except OSError:
        # A rename onto a folder that has files fails: another writer was faster, and its folder is as good. Any other
        # reason stands.
        if read_report(folder) is None:
            raise


def write_durably(path: Path, text: str) -> None:
    """Writes or replaces a file whole: whoever opens it, even after a crash, finds the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            # Before the rename: else a crash could leave the new name on an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
