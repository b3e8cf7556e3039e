"""`Segments`: the stream as JSON lines below `metrics/` of the run's folder, bounded in size.

Storage may be an object store, where no file grows. So lines are gathered for some seconds and written as a segment,
and 16 segments of a level are merged into one of the next. A reader drops lines that it meets twice, so a driver may be
killed between a merge and the deletion of what was merged. When all segments together are too large, every second point
of the oldest ones goes; events stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from podembed.orchestrator.metrics.point import POINT, Line
from podembed.workers.storage.errors import NameNotFound
from podembed.workers.storage.store import Store

FOLDER = "metrics"
MOST_BYTES = 64 << 20
"""Of all segments of a run."""
MOST_SEGMENT_BYTES = 256 << 20
MERGED = 16
"""Segments of a level become one of the next."""
LOCAL_FLUSH_S, REMOTE_FLUSH_S = 2.0, 15.0
_NAME = re.compile(r"metrics/(\d{13}-[0-9a-f]{4})/(\d)-(\d{9})-(\d{9})\.jsonl")
_TOP_LEVEL = 9


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """Of a segment. In the order of names, those of earlier drivers come first.

    Attributes:
      driver: the milliseconds since 1970 at which it began, and some chance.
      first, last: numbers of its lines.
      level: how often it was merged.
    """

    driver: str
    first: int
    last: int
    level: int

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.driver}/{self.level}-{self.first:09d}-{self.last:09d}.jsonl"

    @staticmethod
    def of(path: str) -> SegmentName | None:
        """None for files of other programs."""
        found = _NAME.fullmatch(path)
        return None if found is None else SegmentName(found[1], int(found[3]), int(found[4]), int(found[2]))


def list_segments(store: Store) -> dict[SegmentName, int]:
    """Segments of a run and their bytes, in the order in which they were written."""
    named = ((SegmentName.of(path), size_bytes) for path, size_bytes in store.sizes(FOLDER).items())
    return dict(sorted((name, size_bytes) for name, size_bytes in named if name is not None))


class Segments:
    """A `Sink`. Mutated: lines that wait to be written, and the names of this driver's segments.

    Args:
      driver: as in `SegmentName`.
      monotonic_s: a clock.
      most_bytes: of all segments together, those of earlier drivers included.
    """

    def __init__(
        self, store: Store, *, driver: str, monotonic_s: Callable[[], float], most_bytes: int = MOST_BYTES
    ) -> None:
        self.name = f"{store.location}/{FOLDER}"
        self.flush_s = LOCAL_FLUSH_S if store.is_local else REMOTE_FLUSH_S
        self._store, self._driver, self._monotonic_s, self._most_bytes = store, driver, monotonic_s, most_bytes
        self._waiting: list[str] = []
        self._number = 0
        self._written_s = monotonic_s()
        self._sizes: dict[SegmentName, int] | None = None

    def write(self, line: Line) -> None:
        document = {"number": self._number, "kind": line.kind, "unix_s": round(line.unix_s, 3)}
        # The kind comes early, so that points are known without reading their lines.
        document |= (
            line.values
            if line.kind == POINT
            else {
                "level": line.level,
                "values": dict(line.values),
                "text": line.text,
            }
        )
        self._number += 1
        self._waiting.append(json.dumps(document, separators=(",", ":"), allow_nan=False))

    def flush(self) -> None:
        """Writes a segment if it is time."""
        if self._waiting and self._monotonic_s() - self._written_s >= self.flush_s:
            self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()

    def _write(self) -> None:
        # Whatever happens, the next try comes after the usual time.
        self._written_s = self._monotonic_s()
        first = self._number - len(self._waiting)
        # What cannot be written waits; not for ever, though.
        del self._waiting[: max(0, len(self._waiting) - 100_000)]
        name = SegmentName(self._driver, first, self._number - 1, 0)
        self._put(name, "".join(f"{line}\n" for line in self._waiting).encode())
        self._waiting = []
        self._merge(0)
        self._shrink()

    def _put(self, name: SegmentName, data: bytes) -> None:
        if self._sizes is None:
            self._sizes = list_segments(self._store)
        # A local file would be seen while it is written.
        if self._store.is_local:
            self._store.create_exclusive(name.path, data)
        else:
            self._store.write_new(name.path, [data])
        self._sizes[name] = len(data)

    def _merge(self, level: int) -> None:
        sizes = self._sizes or {}
        own = sorted(name for name in sizes if name.driver == self._driver and name.level == level)
        if len(own) < MERGED or level + 1 >= _TOP_LEVEL:
            return
        merged = SegmentName(self._driver, own[0].first, own[-1].last, level + 1)
        self._put(merged, b"".join(self._read(name) for name in own))
        for name in own:
            self._remove(name)
        self._merge(level + 1)

    def _shrink(self) -> None:
        """Thins the oldest segments until all of them together are small enough."""
        sizes = self._sizes or {}
        total = sum(sizes.values())
        for name in sorted(sizes):
            if total <= self._most_bytes:
                return
            # A segment keeps its name only as long as its content.
            thinner = SegmentName(name.driver, name.first, name.last, min(_TOP_LEVEL, name.level + 1))
            if thinner in sizes:
                continue
            data, before = thinned(self._read(name)), sizes[name]
            self._put(thinner, data)
            self._remove(name)
            total += len(data) - before

    def _read(self, name: SegmentName) -> bytes:
        try:
            return self._store.read(name.path, max_bytes=MOST_SEGMENT_BYTES)
        except NameNotFound:
            # Somebody tidied the folder.
            return b""

    def _remove(self, name: SegmentName) -> None:
        self._store.delete(name.path)
        if self._sizes is not None:
            self._sizes.pop(name, None)


def thinned(data: bytes) -> bytes:
    """Without every second point."""
    kept, num_points = [], 0
    for line in data.splitlines(keepends=True):
        if f'"kind":"{POINT}"'.encode() in line[:60]:
            num_points += 1
            if num_points % 2 == 0:
                continue
        kept.append(line)
    return b"".join(kept)
