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
_logger = logging.getLogger(__name__)


class RequestLog:
    """See the module. A thread writes files; requests that come faster than it writes are not recorded, but counted.

    Args:
      folder: where files go; it is made.
      share: of requests, above 0 and at most 1.
      manifest: schema of the model.

    Attributes:
      num_recorded, num_dropped: requests.
    """

    def __init__(self, folder: str, *, share: float, manifest: Mapping[str, Any], clock: Clock = SYSTEM_CLOCK) -> None:
        if not 0 < share <= 1:
            raise ConfigurationError(f"Found --record-share {share:g}. Expected above 0 and at most 1. Pass 1 for all.")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"Found no way to write to {folder} ({error.strerror}). Expected a folder. Choose another --record."
            ) from error
        self._folder, self._share, self._clock = folder, share, clock
        self._columns = list(needed(manifest))
        self._times = _times(manifest)
        self._random = random.Random()
        self._waiting: queue.Queue[tuple[str, float, Mapping[str, Any], Answer] | None] = queue.Queue(_WAITING)
        self.num_recorded = self.num_dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def take(self, columns: Mapping[str, Any], answer: Answer) -> None:
        """Records a request, or not, by chance."""
        if self._random.random() >= self._share:
            return
        try:
            self._waiting.put_nowait((secrets.token_hex(8), self._clock.wall_s(), columns, answer))
            self.num_recorded += 1
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Writes what waits."""
        self._waiting.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        rows: list[dict[str, Any]] = []
        due_s = self._clock.monotonic_s() + FILE_S
        ends = False
        while not ends:
            try:
                found = self._waiting.get(timeout=max(0.0, due_s - self._clock.monotonic_s()))
                ends = found is None
                if found is not None:
                    rows += self._rows(*found)
            except queue.Empty:
                pass
            if ends or len(rows) >= FILE_ROWS or self._clock.monotonic_s() >= due_s:
                self._write(rows)
                rows, due_s = [], self._clock.monotonic_s() + FILE_S

    def _rows(self, request: str, unix_s: float, columns: Mapping[str, Any], answer: Answer) -> list[dict[str, Any]]:
        outputs = {f"_{name}": values.tolist() for name, values in answer.outputs.items()}
        count = len(next(iter(outputs.values())))
        given = {name: _plain(columns[name], count, is_time=name in self._times) for name in self._columns}
        own = {REQUEST: request, VERSION: answer.version, UNIX_S: unix_s}
        return [
            {name: values[at] for name, values in given.items()}
            | own
            | {POSITION: at}
            | {name: values[at] for name, values in outputs.items()}
            for at in range(count)
        ]

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        name = f"{datetime.fromtimestamp(self._clock.wall_s(), UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}.parquet"
        path = os.path.join(self._folder, name)
        try:
            table = pa.Table.from_pylist(list(rows))
            pq.write_table(table, f"{path}.tmp")
            os.rename(f"{path}.tmp", path)
        except (OSError, pa.ArrowException) as error:
            self.num_dropped += len({row[REQUEST] for row in rows})
            _logger.warning("%d samples are not recorded: %s", len(rows), error)


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
    found = datetime.fromisoformat(value) if value else None
    return found.astimezone(UTC).replace(tzinfo=None) if found is not None and found.tzinfo else found
