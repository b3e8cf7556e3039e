"""`RequestLog`: a share of the requests with their answers, as Parquet files. `podembed replay` scores them again.

A file has a row for each sample. Its columns are those of the model, as training reads them, and behind them
`_request`, `_position`, `_version`, `_unix_s` and `_<output>`. So with labels beside them the files are training data.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import secrets
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact.exported_columns import needed
from podembed.serving.server.scorer import Answer

REQUEST, POSITION, VERSION, UNIX_S = "_request", "_position", "_version", "_unix_s"
FILE_ROWS = 20_000
FILE_S = 60.0
_WAITING = 1_000
_LOOK_S, _CLOSE_S = 0.2, 10.0
_logger = logging.getLogger(__name__)


class RequestLog:
    """See the module. A thread writes files; requests that come faster than it writes are not recorded, but counted.

    Args:
      folder: where files go; it is made.
      share: of requests, above 0 and at most 1.

    Attributes:
      num_recorded, num_dropped: requests.
    """

    def __init__(self, folder: str, *, share: float, clock: Clock = SYSTEM_CLOCK) -> None:
        if not 0 < share <= 1:
            raise ConfigurationError(f"Found --record-share {share:g}. Expected above 0 and at most 1. Pass 1 for all.")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"Found no way to write to {folder} ({error.strerror}). Expected a folder. Choose another --record."
            ) from error
        self._folder, self._share, self._clock = folder, share, clock
        self._random = random.Random()
        self._waiting: queue.Queue[_Kept] = queue.Queue(_WAITING)
        self.num_recorded = self.num_dropped = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def take(self, columns: Mapping[str, Any], answer: Answer, manifest: Mapping[str, Any]) -> None:
        """Records a request, or not, by chance.

        Args:
          manifest: schema of the model.
        """
        if self._random.random() >= self._share:
            return
        try:
            self._waiting.put_nowait((secrets.token_hex(8), self._clock.wall_s(), columns, answer, manifest))
            self.num_recorded += 1
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Writes what waits."""
        self._ends.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _logger.warning("%s did not take all requests within %g s; the last ones are lost", self._folder, _CLOSE_S)

    def _write_all(self) -> None:
        # Requests of one kind of columns go into one file.
        tables: dict[pa.Schema, list[pa.Table]] = {}
        due_s = self._clock.monotonic_s() + FILE_S
        while True:
            ends = self._ends.is_set() and self._waiting.empty()
            try:
                table = None if ends else _table_of(*self._waiting.get(timeout=_LOOK_S))
                if table is not None:
                    tables.setdefault(table.schema, []).append(table)
            except queue.Empty:
                pass
            except Exception as error:
                # A value that no file holds. What others asked is recorded.
                self._drop(1, error)
            num_rows = sum(table.num_rows for some in tables.values() for table in some)
            if ends or num_rows >= FILE_ROWS or self._clock.monotonic_s() >= due_s:
                for some in tables.values():
                    self._write(some)
                tables, due_s = {}, self._clock.monotonic_s() + FILE_S
            if ends:
                return

    def _drop(self, count: int, error: Exception) -> None:
        self.num_recorded -= count
        self.num_dropped += count
        _logger.warning("%d requests are not recorded: %s", count, error)

    def _write(self, tables: Sequence[pa.Table]) -> None:
        name = f"{datetime.fromtimestamp(self._clock.wall_s(), UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}.parquet"
        path = os.path.join(self._folder, name)
        try:
            pq.write_table(pa.concat_tables(tables), f"{path}.tmp")
            os.rename(f"{path}.tmp", path)
        except (OSError, pa.ArrowException) as error:
            self._drop(len(tables), error)


_Kept = tuple[str, float, Mapping[str, Any], Answer, Mapping[str, Any]]


def _table_of(
    request: str, unix_s: float, columns: Mapping[str, Any], answer: Answer, manifest: Mapping[str, Any]
) -> pa.Table:
    outputs = {f"_{name}": values.tolist() for name, values in answer.outputs.items()}
    count = len(next(iter(outputs.values())))
    times = _times(manifest)
    given = {name: _plain(columns[name], count, is_time=name in times) for name in needed(manifest) if name in columns}
    own = {REQUEST: [request] * count, POSITION: list(range(count)), VERSION: [answer.version] * count}
    return pa.table({**given, **own, UNIX_S: [unix_s] * count, **outputs})


def _times(manifest: Mapping[str, Any]) -> set[str]:
    """Columns of times, which a client sends as text."""
    columns = [(one["name"], one) for one in (*manifest["dense_columns"], *manifest["extra_columns"])]
    columns += [
        (part["column"], part) for feature in manifest["features"] for part in (feature, *feature["crossed_with"])
    ]
    return {name for name, one in columns if one["holds"] == "times"}


def _plain(values: Any, count: int, *, is_time: bool) -> list[Any]:
    """Plain values, one a sample."""
    listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
    listed = [one.tolist() if isinstance(one, np.ndarray) else one for one in listed]
    if is_time:
        listed = [[_time(one) for one in value] if isinstance(value, list) else _time(value) for value in listed]
    return listed * count if len(listed) == 1 and count > 1 else listed


def _time(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value:
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        # Such as a month alone.
        found = np.datetime64(value, "us").item()
    return found.astimezone(UTC).replace(tzinfo=None) if found.tzinfo else found
