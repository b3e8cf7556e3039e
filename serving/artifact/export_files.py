"""Where the files of an export go: a folder of this machine, or a URL.

The folder appears when it is complete. At a URL the manifest comes last.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from podembed.serving.new_files import new_folder, taken
from podembed.workers.data.files import filesystem_of

MANIFEST = "manifest.json"


class _Digested:
    """A file that is written front to back, with its size and its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self.size_bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self.size_bytes += len(view)
        return len(view)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class ExportFiles:
    """The files that have been written so far. Mutated by `write`.

    Attributes:
      written: name to size in bytes and SHA-256, as the manifest has them.
    """

    def __init__(self, open_file: Callable[[str], Any]) -> None:
        self._open = open_file
        self.written: dict[str, dict[str, Any]] = {}

    def write(self, name: str, fill: Callable[[BinaryIO], None]) -> None:
        """Writes one file by `fill`."""
        with self._open(name) as file:
            digested = _Digested(file)
            fill(cast(BinaryIO, digested))
        self.written[name] = {"size_bytes": digested.size_bytes, "sha256": digested.sha256}

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes one file whole."""

        def fill(file: BinaryIO) -> None:
            file.write(data)

        self.write(name, fill)


@contextmanager
def export_folder(out: str) -> Iterator[ExportFiles]:
    """The files of a new export. What is there when the block ends well is an export; else there is none.

    Raises:
      ConfigurationError: there is something at `out` already, or nothing can be written there.
    """
    if "://" in out:
        with _at_url(out) as files:
            yield files
        return
    with new_folder(out) as folder:

        @contextmanager
        def open_file(name: str) -> Iterator[BinaryIO]:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())

        yield ExportFiles(open_file)


@contextmanager
def _at_url(out: str) -> Iterator[ExportFiles]:
    filesystem, location = filesystem_of(out.rstrip("/"))
    if filesystem.exists(f"{location}/{MANIFEST}"):
        raise taken(out)

    def open_file(name: str) -> Any:
        path = f"{location}/{name}"
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        return filesystem.open(path, "wb")

    yield ExportFiles(open_file)
