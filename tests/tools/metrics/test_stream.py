"""Segments and their reader, on real files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from podembed.tools.metrics import segments as segments_module
from podembed.tools.metrics.point import POINT, Measurement, Point, StreamLine
from podembed.tools.metrics.reading import StreamReader, without_lost
from podembed.tools.metrics.segments import MERGED, Segments, list_segments
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Files, Store
from tests.clock import FakeClock


def a_point(first: int, step: int, *, generation: int = 1, loss: float = 0.5) -> Point:
    return Point(
        generation=generation,
        first_step=first,
        step=step,
        unix_s=1000.0 + step,
        measurements=(Measurement("loss", loss), Measurement("memory_bytes", 7.0, {"host": "0"})),
    )


def as_line(point: Point) -> StreamLine:
    return StreamLine(kind=POINT, unix_s=point.unix_s, values=point.to_json(), point=point)


def an_event(text: str) -> StreamLine:
    return StreamLine(kind="commit", unix_s=5.0, values={"step": 3}, text=text)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def written(
    store: Store, lines: Sequence[StreamLine], *, driver: str = "0000000000001-aaaa", most_bytes: int = 1 << 26
) -> None:
    """Each line in a segment of its own, as far as they are not merged."""
    clock = FakeClock()
    segments = Segments(store, driver=driver, monotonic_s=clock.monotonic_s, most_bytes=most_bytes)
    for line in lines:
        clock.now_s += 60
        segments.write(line)
        segments.flush()
    segments.close()


def test_what_was_written_is_read_back(store: Store) -> None:
    points = [a_point(0, 10), a_point(10, 20, loss=float("nan"))]
    written(store, [*map(as_line, points), an_event("committed")])
    stream = StreamReader(store).read()
    assert stream.points[0] == points[0]
    assert [step for step, _ in stream.series("memory_bytes", host="0")] == [10, 20]
    loss = stream.points[1].value("loss")
    assert loss is not None
    assert loss != loss, "a number that is not finite stays one"
    assert [(line.text, line.values) for line in stream.events] == [("committed", {"step": 3})]
    assert (stream.num_drivers, stream.num_unread) == (1, 0)


def test_an_empty_run_has_an_empty_stream(store: Store) -> None:
    assert StreamReader(store).read().points == ()


def test_segments_are_merged_and_none_is_read_twice(store: Store) -> None:
    written(store, [as_line(a_point(at, at + 1)) for at in range(MERGED * MERGED + 3)])
    names = list_segments(store)
    assert len(names) == 1 + 3
    assert {name.level for name in names} == {0, 2}
    assert [point.step for point in StreamReader(store).read().points] == list(range(1, MERGED * MERGED + 4))


def test_a_driver_that_was_killed_while_it_merged_repeats_nothing(store: Store, tmp_path: Path) -> None:
    written(store, [as_line(a_point(at, at + 1)) for at in range(MERGED - 1)])
    names = list(list_segments(store))
    merged = b"".join((tmp_path / name.path).read_bytes() for name in names)
    last = names[-1].last
    (tmp_path / "metrics" / "0000000000001-aaaa" / f"1-{0:09d}-{last:09d}.jsonl").write_bytes(merged)
    assert len(StreamReader(store).read().points) == MERGED - 1


def test_the_size_is_bounded_and_events_stay(store: Store) -> None:
    lines = [as_line(a_point(at, at + 1)) for at in range(2000)]
    written(store, [an_event("the first"), *lines], most_bytes=60_000)
    assert sum(list_segments(store).values()) <= 60_000 + 10_000
    stream = StreamReader(store).read()
    assert [line.text for line in stream.events] == ["the first"]
    assert 100 < len(stream.points) < 2000
    assert stream.points[-1].step == 2000
    assert stream.points[0].step < 100, "old points become fewer; they do not go altogether"


def test_events_of_a_kind_that_are_many_become_fewer_when_no_point_is_left(store: Store) -> None:
    events = [an_event(f"commit {at}") for at in range(3000)]
    begun = StreamLine(kind="begin", unix_s=5.0, values={}, text="begun")
    written(store, [begun, *events, as_line(a_point(0, 1))], most_bytes=30_000)
    assert sum(list_segments(store).values()) <= 30_000
    texts = [line.text for line in StreamReader(store).read().events]
    assert texts[:2] == ["begun", "commit 0"]
    assert 100 < len(texts) < 3000
    assert texts[-1].startswith("commit 29")


class NoDeletes:
    """A storage of which a role may write and not delete."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def delete(self, name: str) -> None:
        raise PermissionError(f"DeleteObject of {name} is refused")


def test_a_storage_that_deletes_nothing_is_not_filled(store: Store) -> None:
    clock = FakeClock()
    segments = Segments(
        store.through(lambda files: cast("Files", NoDeletes(files))),
        driver="0000000000001-aaaa",
        monotonic_s=clock.monotonic_s,
        most_bytes=20_000,
    )
    for at in range(1000):
        clock.now_s += 600
        segments.write(as_line(a_point(at, at + 1)))
        with contextlib.suppress(StorageError, PermissionError):
            segments.flush()
    assert sum(list_segments(store).values()) <= 20_000 + 10_000
    assert len(StreamReader(store).read().points) > 10


def test_what_cannot_be_written_waits_within_bounds(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "MOST_WAITING_BYTES", 5000)
    (tmp_path / "metrics").write_text("a file in the folder's place")
    clock = FakeClock()
    segments = Segments(store, driver="0000000000001-aaaa", monotonic_s=clock.monotonic_s)
    tries = 0
    for at in range(1000):
        clock.now_s += 1
        segments.write(as_line(a_point(at, at + 1)))
        try:
            segments.flush()
        except Exception:
            tries += 1
    assert 5 < tries < 30, "tries become rare"
    (tmp_path / "metrics").unlink()
    segments.close()
    points = StreamReader(store).read().points
    assert points[-1].step == 1000
    assert 10 < len(points) < 60


def test_drivers_are_ordered_by_generation_and_not_by_their_clocks(store: Store) -> None:
    written(store, [as_line(a_point(0, 10)), as_line(a_point(10, 20))], driver="0000000000009-aaaa")
    written(store, [as_line(a_point(10, 30, generation=2))], driver="0000000000002-bbbb")
    assert [(one.generation, one.step) for one in StreamReader(store).read().points] == [(1, 10), (2, 30)]


def test_a_reader_beside_its_writer_reads_each_segment_once(store: Store, tmp_path: Path) -> None:
    clock = FakeClock()
    segments = Segments(store, driver="0000000000001-aaaa", monotonic_s=clock.monotonic_s)
    reader, seen = StreamReader(store), []
    for at in range(3 * MERGED):
        clock.now_s += 60
        segments.write(as_line(a_point(at, at + 1)))
        segments.flush()
        seen.append(len(reader.read().points))
    assert seen == list(range(1, 3 * MERGED + 1))


def test_damaged_lines_are_counted_and_left_out(store: Store, tmp_path: Path) -> None:
    written(store, [as_line(a_point(0, 1)), as_line(a_point(1, 2))])
    path = next(iter((tmp_path / "metrics").rglob("*.jsonl")))
    path.write_bytes(path.read_bytes()[:-20] + b'\n[]\n{"number": "x"}\n')
    stream = StreamReader(store).read()
    assert len(stream.points) == 1
    assert stream.num_unread == 3


def test_names_of_later_versions_stay_readable(store: Store, tmp_path: Path) -> None:
    document = {"number": 0, "kind": POINT, "unix_s": 1.0, "generation": 1, "first_step": 0, "step": 1}
    document |= {"values": [["of_next_year", 3.0]]}
    folder = tmp_path / "metrics" / "0000000000001-aaaa"
    folder.mkdir(parents=True)
    (folder / f"0-{0:09d}-{0:09d}.jsonl").write_text(json.dumps(document) + "\n")
    assert StreamReader(store).read().series("of_next_year") == [(1, 3.0)]


def test_steps_that_a_fault_took_back_do_not_count_twice() -> None:
    """Also where a second fault comes before the first one's steps are done again."""
    points = [
        a_point(0, 10),
        a_point(10, 20),
        a_point(20, 30),
        a_point(10, 20, generation=2),
        a_point(0, 10, generation=3),
        a_point(10, 20, generation=3),
    ]
    counted, lost = without_lost(points)
    assert [(one.generation, one.step) for one in counted] == [(3, 10), (3, 20)]
    assert len(lost) == 4


def test_a_late_commit_before_a_fault_hides_no_lost_step() -> None:
    points = [a_point(0, 10), a_point(10, 20), a_point(20, 30), a_point(10, 10), a_point(10, 20, generation=2)]
    counted, lost = without_lost(points)
    assert [(one.generation, one.step) for one in counted] == [(1, 10), (1, 10), (2, 20)]
    assert [one.step for one in lost] == [20, 30]


def test_the_driver_of_a_resumed_run_takes_back_what_was_not_committed(store: Store) -> None:
    written(store, [as_line(a_point(0, 10)), as_line(a_point(10, 20))])
    written(store, [as_line(a_point(10, 20, generation=2))], driver="0000000000002-bbbb")
    stream = StreamReader(store).read()
    assert [(one.generation, one.step) for one in stream.points] == [(1, 10), (2, 20)]
    assert [(one.generation, one.step) for one in stream.lost] == [(1, 20)]
    assert stream.num_drivers == 2
