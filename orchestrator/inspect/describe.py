"""Writing a table of a commit to a file for other programs: NumPy, Parquet or safetensors, rows in order.

Every format is written front to back from batches of rows, so memory does not depend on the table's size. The file
appears under its name when it is complete and durable, and every byte read was what had been committed. Before that,
and if anything fails, there is nothing.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.inspect.export_formats import Source, write_npy, write_parquet, write_safetensors
from podembed.orchestrator.inspect.rows import BATCH_BYTES
from podembed.orchestrator.run.reference import CommittedState
from podembed.workers.storage.local import NO_HARD_LINKS
from podembed.workers.storage.store import place

Format = Literal["npy", "parquet", "safetensors"]
_WRITERS: dict[str, Callable[[BinaryIO, Source], None]] = {
    "npy": write_npy,
    "parquet": write_parquet,
    "safetensors": write_safetensors,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file that was written."""

    path: str
    table: str
    commit: str
    num_rows: int
    widths: dict[str, int]
    size_bytes: int


def export(
    state: CommittedState,
    table: str,
    *,
    format: Format,
    out: str,
    with_slots: bool = False,
    force: bool = False,
    batch_bytes: int = BATCH_BYTES,
) -> Exported:
    """Writes one table.

    Args:
      format: `npy` holds `[num_rows, dim]`, or with slots one record per row with a field per array. `parquet` holds a
        column `id` and one list column per array, `safetensors` one tensor per array.
      out: a local path.
      with_slots: also the optimizer's state.
      force: replace a file that is there.
      batch_bytes: memory for rows.

    Raises:
      ConfigurationError: no such table, a file or no folder at `out`, or element types that the format does not have.
      ChunkDamaged: the commit is damaged; nothing was written.
    """
    files = state.table(table)
    source = Source(
        store=state.store,
        table=files,
        arrays=files.arrays if with_slots else files.arrays[:1],
        information={
            "table": files.name,
            "run_id": state.manifest.run_id,
            "commit": state.manifest.name,
            "step": str(state.manifest.step),
        },
        batch_bytes=batch_bytes,
        with_slots=with_slots,
    )
    path = place(out)
    with new_file(path, force=force) as file:
        _WRITERS[format](file, source)
    return Exported(
        path=os.path.abspath(path),
        table=files.name,
        commit=state.manifest.name,
        num_rows=files.num_rows,
        widths={array.name: array.width for array in source.arrays},
        size_bytes=os.stat(path).st_size,
    )


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
