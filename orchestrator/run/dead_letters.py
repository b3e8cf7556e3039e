"""Malformed rows of a run, written to its folder: `malformed/g<generation>-<number>.jsonl`, one JSON object a line.

Hosts report the rows that they leave out. The driver writes each row once, whichever host met it and however often it
is read again. It ends the run when there are more than the job tolerates. Files are written once and never changed, as
everything in a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from podembed.orchestrator.api.run_errors import DataFailed
from podembed.workers.data.bad_rows import BadRow, too_many
from podembed.workers.input.index import InputIndex
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, parse_strictly

FOLDER = "malformed"
_MAX_FILE_BYTES = 256 << 20


class DeadLetters:
    """The malformed rows of one run. Mutated by `add`, from the driver's thread."""

    def __init__(self, store: Store, *, max_bad_rows: int) -> None:
        """Reads what earlier drivers wrote.

        Raises:
          DocumentRefused: a file is damaged.
        """
        self._store = store
        self._max_bad_rows = max_bad_rows
        self._places: set[tuple[str, int]] = set()
        for name in store.children(FOLDER):
            path = f"{FOLDER}/{name}"
            for line in store.read(path, max_bytes=_MAX_FILE_BYTES).splitlines():
                self._places.add(_place(path, line))

    @property
    def location(self) -> str:
        return self._store.locate(FOLDER)

    @property
    def num_rows(self) -> int:
        """Distinct malformed rows of the run so far."""
        return len(self._places)

    def add(self, rows: Iterable[BadRow], *, generation: int) -> int:
        """Writes those that are new, and returns how many they are.

        Raises:
          DataFailed: there are more than the job tolerates.
        """
        new = {row.place: row for row in rows if row.place not in self._places}
        if not new:
            return 0
        self._places |= new.keys()
        content = "".join(json.dumps(asdict(row)) + "\n" for row in new.values()).encode()
        number = 0
        while not self._store.create_exclusive(f"{FOLDER}/g{generation:08d}-{number:05d}.jsonl", content):
            number += 1
        if len(self._places) > self._max_bad_rows:
            raise DataFailed(f"{too_many(list(new.values()), self._max_bad_rows)} All are listed in {self.location}.")
        return len(new)

    def require_good_rows(self, training: InputIndex) -> None:
        """Raises `DataFailed` if all rows of the training data are malformed: the run would train nothing, and end
        well.
        """
        paths = {file.path for file in training.files}
        if sum(path in paths for path, _ in self._places) >= training.num_rows:
            raise DataFailed(
                f"Found all {training.num_rows:,} rows of the training data malformed, listed in {self.location}. "
                "Expected some to train on. Check "
                "what the job declares of the columns, and that these are the files that you mean."
            )


def _place(name: str, line: bytes) -> tuple[str, int]:
    entry = parse_strictly(name, line)
    if not isinstance(entry, dict) or not isinstance(entry.get("file"), str) or type(entry.get("row")) is not int:
        raise DocumentRefused(name, "a line without a file and a row", "one malformed row a line")
    return entry["file"], entry["row"]
