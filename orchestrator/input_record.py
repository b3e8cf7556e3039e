"""`INPUT.json`: the data files that a run began with, so that one that changed can be named; and the check itself.

What tells a changed file is its size, and its etag or time of change as the filesystem reports it; for a set of `.npy` files those of all
three. Content is not read again: a file that is rewritten with the same size and the same time passes. Written once, right after
`RUN.json`; a run without it (its first start was killed in between) is checked by the fingerprint in `RUN.json` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config import ConfigurationError
from orchestrator.records import decode, encode
from workers.input_index import InputIndex, changed_files
from workers.storage import Store
from workers.storage_errors import NameNotFound

INPUT_FILE = "INPUT.json"
_MAX_INPUT_BYTES = 256 << 20
_NAMED_FILES = 5


class InputChanged(ConfigurationError):
    """The data files are not those that the run began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One data file or vocabulary when the run began. `version` is its etag or time of change."""

    path: str
    size_bytes: int
    version: str
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """The files of training and evaluation, with the vocabularies of their id columns."""

    training: tuple[FileRecord, ...]
    evaluation: tuple[FileRecord, ...]


def write_input(store: Store, train: InputIndex, evaluation: InputIndex | None) -> None:
    """Records the files of a new run; leaves the record of an existing one."""
    record = InputRecord(training=_records(train), evaluation=_records(evaluation))
    store.create_exclusive(INPUT_FILE, encode(record))


def check_input(store: Store, train: InputIndex, evaluation: InputIndex | None) -> None:
    """Compares the files with those that the run began with.

    Raises:
      InputChanged: naming them.
      DocumentRefused: the record is damaged.
    """
    try:
        content = store.read(INPUT_FILE, max_bytes=_MAX_INPUT_BYTES)
    except NameNotFound:
        return
    record = decode(InputRecord, INPUT_FILE, content, max_bytes=_MAX_INPUT_BYTES)
    changed = _changed(record.training, train) + _changed(record.evaluation, evaluation)
    if changed:
        raise input_changed(store, changed)


def input_changed(store: Store, changed: list[str]) -> InputChanged:
    """The error that names the files, as far as they are known."""
    named = "; ".join(changed[:_NAMED_FILES]) or "names, sizes, times or row counts differ"
    more = f"; and {len(changed) - _NAMED_FILES} more" if len(changed) > _NAMED_FILES else ""
    return InputChanged(
        f"The data files of the run in {store.location} changed since it began: {named}{more}. Expected the same, since the position in the "
        "data counts their rows. Restore them, or pass --accept-input-change to podembed resume (RunConfig(accept_input_change=True)) if the "
        "rows are the same."
    )


def _records(index: InputIndex | None) -> tuple[FileRecord, ...]:
    files = (*index.files, *index.vocabularies) if index else ()
    return tuple(
        FileRecord(path=file.path, size_bytes=file.size_bytes, version=file.version, num_rows=file.num_rows)
        for file in files
    )


def _changed(before: tuple[FileRecord, ...], now: InputIndex | None) -> list[str]:
    known = [(file.path, file.size_bytes, file.version) for file in before]
    return changed_files(known, now or InputIndex(files=()))
