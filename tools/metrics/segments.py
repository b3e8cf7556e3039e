"""`Segments`: the stream as JSON lines below `metrics/` of the run's folder, bounded in size.

Storage may be an object store, where no file grows. So lines are gathered for some seconds and written as a segment,
and 16 segments of a level are merged into one of the next. A reader drops lines that it meets twice, so a driver may be
killed between a merge and the deletion of what was merged. When all segments together are too large, every second point
of the largest goes. Where points alone do not suffice, so do events of the kinds that are many. The first of each kind
stays.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from podembed.tools.metrics.point import POINT, StreamLine
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store

FOLDER = "metrics"
MOST_BYTES = 64 << 20
"""Most bytes of all segments of a run."""
MOST_SEGMENT_BYTES = 256 << 20
MERGED = 16
"""Segments of a level become one of the next."""
LOCAL_FLUSH_S, REMOTE_FLUSH_S = 2.0, 15.0
MOST_WAITING_BYTES = 8 << 20
"""Most bytes of lines that cannot be written now."""
LONGEST_PAUSE_S = 120.0
"""Between two tries."""
_NAME = re.compile(r"metrics/(\d{13}-[0-9a-f]{4})/(\d{1,2})-(\d{9})-(\d{9})\.jsonl")
_TOP_LEVEL = 99
_KIND = re.compile(rb'\{"number":\d+,"kind":"(\w*)"')


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """The name of a segment. In the order of names, those of earlier drivers come first.

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
    """A `Sink`. Mutated: lines that wait to be written, and what is known of the run's segments.

    Args:
      driver: driver as in `SegmentName`.
      monotonic_s: a clock.
      most_bytes: most bytes of all segments together, those of earlier drivers included.
    """

    def __init__(
        self, store: Store, *, driver: str, monotonic_s: Callable[[], float], most_bytes: int = MOST_BYTES
    ) -> None:
        self.name = f"{store.location}/{FOLDER}"
        self.flush_s = LOCAL_FLUSH_S if store.is_local else REMOTE_FLUSH_S
        self._store, self._driver, self._monotonic_s, self._most_bytes = store, driver, monotonic_s, most_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._number = 0
        self._pause_s = self.flush_s
        self._tried_s = monotonic_s()
        self._sizes: dict[SegmentName, int] | None = None
        # Segments whose lines are in others by now, and that the storage has not deleted yet.
        self._merged: list[SegmentName] = []
        # Segments that nothing more can be taken from.
        self._smallest: set[SegmentName] = set()

    def write(self, line: StreamLine) -> None:
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
        text = f"{json.dumps(document, separators=(',', ':'), allow_nan=False, default=float)}\n".encode()
        self._number += 1
        self._waiting.append(text)
        self._waiting_bytes += len(text)
        # What cannot be written waits; not for ever, though.
        while self._waiting_bytes > MOST_WAITING_BYTES and len(self._waiting) > 1:
            self._waiting_bytes -= len(self._waiting.popleft())

    def flush(self) -> None:
        """Writes a segment if it is time."""
        if self._waiting and self._monotonic_s() - self._tried_s >= self._pause_s:
            self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()

    def _write(self) -> None:
        self._tried_s = self._monotonic_s()
        # Until it works again, tries become rare.
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        sizes = self._known()
        if self._merged and sum(sizes.values()) > self._most_bytes:
            self._delete_merged()
        name = SegmentName(self._driver, self._number - len(self._waiting), self._number - 1, 0)
        self._put(name, b"".join(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0
        self._delete_merged()
        self._merge(0)
        self._shrink()
        self._pause_s = self.flush_s

    def _known(self) -> dict[SegmentName, int]:
        if self._sizes is None:
            self._sizes = list_segments(self._store)
        return self._sizes

    def _put(self, name: SegmentName, data: bytes) -> None:
        sizes = self._known()
        # A local file would be seen while it is written.
        if self._store.is_local:
            self._store.create_exclusive(name.path, data)
        else:
            self._store.write_new(name.path, [data])
        sizes[name] = len(data)

    def _merge(self, level: int) -> None:
        sizes = self._known()
        own = sorted(name for name in sizes if name.driver == self._driver and name.level == level)
        if len(own) < MERGED or level + 1 >= _TOP_LEVEL:
            return
        merged = SegmentName(self._driver, own[0].first, own[-1].last, level + 1)
        self._replace(own, merged, b"".join(self._read(name) for name in own))
        self._merge(level + 1)

    def _shrink(self) -> None:
        """Thins the largest segments until all of them together are small enough, so that all times stay."""
        sizes = self._known()
        while sum(sizes.values()) > self._most_bytes and (able := sizes.keys() - self._smallest):
            name = max(able, key=lambda one: (sizes[one], -one.first))
            # A segment keeps its name only as long as its content.
            thinner = SegmentName(name.driver, name.first, name.last, name.level + 1)
            data = self._read(name)
            fewer = thinned(data)
            if len(fewer) == len(data) or thinner in sizes or thinner.level > _TOP_LEVEL:
                self._smallest.add(name)
            else:
                self._replace([name], thinner, fewer)

    def _replace(self, names: Sequence[SegmentName], new: SegmentName, data: bytes) -> None:
        """Puts one segment in the place of others."""
        if data:
            self._put(new, data)
        self._merged += names
        self._delete_merged()

    def _delete_merged(self) -> None:
        # Where the storage does not delete, this raises, so that nothing is merged again and again.
        while self._merged:
            self._store.delete(self._merged[0].path)
            self._known().pop(self._merged.pop(0), None)

    def _read(self, name: SegmentName) -> bytes:
        try:
            return self._store.read(name.path, max_bytes=MOST_SEGMENT_BYTES)
        except NameNotFound:
            # Somebody tidied the folder.
            return b""


def thinned(data: bytes) -> bytes:
    """The lines without every second point; a single one goes, too. Where there is none, without every second event of
    the most frequent kind.
    """
    lines = data.splitlines(keepends=True)
    of_kind: defaultdict[bytes, list[int]] = defaultdict(list)
    for at, line in enumerate(lines):
        found = _KIND.match(line)
        of_kind[found[1] if found else b""].append(at)
    points = of_kind.pop(POINT.encode(), [])
    if points:
        gone = set(points[1::2] if len(points) > 1 else points)
    else:
        gone = set(max(of_kind.values(), key=len, default=[])[1::2])
    return b"".join(line for at, line in enumerate(lines) if at not in gone)
