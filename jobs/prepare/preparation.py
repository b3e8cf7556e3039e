"""`prepare`: text files to a prepared set, piece by piece in several processes.

While it works, everything lies in a hidden sibling of the target folder: finished parts, and a record of each. After a
kill, or a stop by malformed lines, the next call continues from those records. Only what had no record is done again.
When the last part is there, one rename puts the folder in place, so a folder of that name is a whole set. Which bytes
are written depends on the sources and the settings alone, not on the number of processes or on interruptions.

The processes are children without shared state; they get a piece, write files, and end when this process does.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from podembed.jobs.finished_folder import finish, read_report, write_durably
from podembed.jobs.prepare import work
from podembed.jobs.prepare.forms import open_form
from podembed.jobs.prepare.page import render_page
from podembed.jobs.prepare.pieces import Piece, plan_pieces
from podembed.jobs.prepare.prepared_set import FILE_NAME, PreparedField, PreparedSet, dense_to_json, read_prepared
from podembed.jobs.prepare.report import build_report
from podembed.jobs.prepare.rows_of_values import RESERVED_ROWS
from podembed.jobs.prepare.settings import PrepareError, PrepareSettings
from podembed.jobs.search_path import without_current_folder
from podembed.jobs.text.blocks import TextError
from podembed.jobs.text.criteo import BadLine
from podembed.workers.data.files import file_version, locate

REPORT_NAME = "report.json"
PAGE_NAME = "report.html"
DEAD_LETTER_NAME = "malformed.jsonl"
_FORMAT_VERSION = 1
_NAMED_BAD_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationProgress:
    """How far one stage is: `count` or `write`. Bytes are those of the sources on disk."""

    stage: str
    done_bytes: int
    total_bytes: int
    lines: int
    malformed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFolder:
    """A prepared set in place.

    Attributes:
      report: the content of `report.json`.
      was_there: whether the folder was complete already.
      resumed_pieces: pieces whose part was there from an earlier call.
    """

    folder: Path
    declaration: PreparedSet
    report: dict[str, Any]
    was_there: bool
    resumed_pieces: int


def prepare(
    sources: Sequence[str],
    folder: Path,
    settings: PrepareSettings,
    *,
    workers: int,
    max_bad_lines: int,
    like: Path | None = None,
    on_progress: Callable[[PreparationProgress], None] = lambda progress: None,
) -> PreparedFolder:
    """Prepares text, or goes on with it, or finds it prepared.

    Args:
      sources: paths or globs, local or URLs; read in sorted order.
      folder: local; must not be there, or be what this call would write.
      workers: processes; 1 works in this one.
      max_bad_lines: malformed lines that are put aside over all sources before the preparation stops.
      like: a prepared set whose vocabularies are taken over.

    Raises:
      PrepareError: the folder, or the unfinished one beside it, comes from other sources or settings, or somebody works
        in it.
      TextError: more than `max_bad_lines` lines are malformed, a file is damaged, or there is no line at all.
      InputError: a pattern matches nothing.
      FolderError: the folder is damaged.
    """
    files = locate(sources)
    identity = _identity(files, settings)
    unfinished = folder.parent / f".{folder.name}.unfinished"
    with _sole_owner(unfinished):
        present = read_report(folder)
        if present is not None:
            # Whatever lies beside a whole set is left over from its making, or empty.
            shutil.rmtree(unfinished)
            return _present(folder, present, identity)
        _check_plan(unfinished / "plan.json", identity, folder)
        place = work.Workplace(
            records=unfinished / "records",
            prepared=unfinished / "set",
            settings=settings,
            form=open_form(settings, files),
            max_bad_lines=max_bad_lines,
        )
        place.records.mkdir(exist_ok=True)
        (place.prepared / "vocabulary").mkdir(parents=True, exist_ok=True)
        pieces = plan_pieces(files, piece_bytes=settings.piece_bytes)
        with WorkerProcesses(workers) as thread_pool:
            stages = _Stages(place, pieces, thread_pool, on_progress)
            fields = stages.fields(like)
            resumed = sum(work.read_record(place.record(work.part_record_name(piece))) is not None for piece in pieces)
            records = stages.parts(fields)
        _check_unchanged(files, settings, identity, unfinished)
        declaration = PreparedSet(form=settings.form, label=settings.label, dense=settings.dense, fields=fields)
        report = _finish(place, folder, identity, declaration, pieces, records)
        shutil.rmtree(unfinished)
    return PreparedFolder(
        folder=folder, declaration=declaration, report=report, was_there=False, resumed_pieces=resumed
    )


def _identity(files: Sequence[str], settings: PrepareSettings) -> dict[str, Any]:
    """All that decides the bytes of the set. Sources count by name, size and time or etag."""
    sources = [[path, *file_version(path)] for path in files]
    described = {**asdict(settings), "dense": dense_to_json(settings.dense)}
    return json.loads(json.dumps({"format_version": _FORMAT_VERSION, "sources": sources, "settings": described}))


def _present(folder: Path, report: dict[str, Any], identity: dict[str, Any]) -> PreparedFolder:
    if report.get("prepared_from") != identity:
        raise PrepareError(
            f"Found {folder}, prepared from other sources or with other settings: "
            f"{_difference(report.get('prepared_from'), identity)}. "
            "Expected none, or one of these. Choose another --out, or remove the folder."
        )
    return PreparedFolder(
        folder=folder,
        declaration=read_prepared(str(folder / FILE_NAME)),
        report=json.loads((folder / REPORT_NAME).read_text(encoding="utf-8")),
        was_there=True,
        resumed_pieces=0,
    )


def _check_plan(path: Path, identity: dict[str, Any], folder: Path) -> None:
    """Notes what is prepared here, or makes sure that it is this."""
    if not path.exists():
        write_durably(path, json.dumps(identity))
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if found != identity:
        raise PrepareError(
            f"Found {path.parent}, an unfinished preparation from other sources or with other settings: "
            f"{_difference(found, identity)}. Expected the same to go on with it. Repeat the command that began it, or "
            f"remove that folder to begin {folder} anew."
        )


def _check_unchanged(
    files: Sequence[str], settings: PrepareSettings, identity: dict[str, Any], unfinished: Path
) -> None:
    """Compares the sources, now that they are read, with what they were when the preparation began."""
    now = _identity(files, settings)
    if now != identity:
        raise PrepareError(
            f"Found that while it was read, {_difference(identity, now)}. Expected sources at rest. Wait until they "
            f"are complete, remove {unfinished}, and repeat the command."
        )


def _difference(found: Any, expected: dict[str, Any]) -> str:
    """The first thing that differs, in words."""
    if not isinstance(found, dict):
        return "it was not written by podembed prepare"
    if found.get("sources") != expected["sources"]:
        before = {tuple(source) for source in found.get("sources", [])}
        now = {tuple(source) for source in expected["sources"]}
        return f"source {sorted(before ^ now)[0][0]} was added, removed or changed"
    for name, value in expected["settings"].items():
        if found.get("settings", {}).get(name) != value:
            return _first_difference(name, found.get("settings", {}).get(name), value)
    return "its format has another version"


def _first_difference(where: str, was: Any, now: Any) -> str:
    """The first value within two settings that differs; members of a list are called by their names."""
    if isinstance(was, dict) and isinstance(now, dict) and was.get("name") == now.get("name"):
        key = next(key for key in {**was, **now} if was.get(key) != now.get(key))
        return _first_difference(
            f"{key} of {now['name']}" if "name" in now else f"{where}.{key}", was.get(key), now.get(key)
        )
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        at = next(at for at, (one, other) in enumerate(zip(was, now, strict=True)) if one != other)
        return _first_difference(where, was[at], now[at])
    return f"{where} was {_shown(was)} and is {_shown(now)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    return str(value["name"] if isinstance(value, dict) and "name" in value else value)[:80]


@contextmanager
def _sole_owner(unfinished: Path) -> Iterator[None]:
    """Holds the folder; a lock of the operating system, which a killed holder loses."""
    unfinished.mkdir(parents=True, exist_ok=True)
    with open(unfinished / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PrepareError(
                f"Found another process preparing in {unfinished}. Expected none. Wait for it, or choose another --out."
            ) from error
        yield


@dataclass(slots=True)
class _Stages:
    """The stages of a preparation over all pieces; each does only what has no record yet."""

    place: work.Workplace
    pieces: tuple[Piece, ...]
    thread_pool: WorkerProcesses
    on_progress: Callable[[PreparationProgress], None]

    def fields(self, like: Path | None) -> tuple[PreparedField, ...]:
        """How many rows each field's table has; makes or copies the vocabularies on the way."""
        names = [plan.name for plan in self.place.settings.fields if plan.ids == "vocabulary"]
        if like is not None:
            for name in names:
                text = (like / "vocabulary" / f"{name}.txt").read_bytes().decode("utf-8")
                write_durably(self.place.vocabulary(name), text)
        elif names:
            self._run("count", work.count_piece, work.counts_name)
            missing = [name for name in names if not self.place.record(work.vocabulary_name(self.place, name)).exists()]
            for _ in self.thread_pool.run(work.make_vocabulary, [(self.place, name, self.pieces) for name in missing]):
                pass
        return tuple(self._field(plan.name) for plan in self.place.settings.fields)

    def parts(self, fields: tuple[PreparedField, ...]) -> list[work.PieceRecord]:
        """Writes all parts; their records in the order of the pieces."""
        return self._run("write", work.write_piece, work.part_record_name, fields)

    def _field(self, name: str) -> PreparedField:
        plan = next(plan for plan in self.place.settings.fields if plan.name == name)
        if plan.ids == "hash":
            rows = plan.max_rows or 0
            return PreparedField(name=name, ids="hash", rows=rows, salt=plan.salt, min_count=plan.min_count)
        path = self.place.vocabulary(name)
        content = path.read_bytes()
        return PreparedField(
            name=name,
            ids="vocabulary",
            rows=content.count(b"\n") + RESERVED_ROWS,
            salt=plan.salt,
            min_count=plan.min_count,
            vocabulary=path.relative_to(self.place.prepared).as_posix(),
            vocabulary_sha256=hashlib.sha256(content).hexdigest(),
        )

    def _run(
        self, stage: str, function: Callable[..., Any], record_name: Callable[[Piece], str], *arguments: Any
    ) -> list[work.PieceRecord]:
        """One stage over all pieces.

        Raises:
          TextError: there are too many malformed lines over all pieces, or no line at all.
        """
        records: dict[int, work.PieceRecord] = {}
        for piece in self.pieces:
            record = work.read_record(self.place.record(record_name(piece)))
            if record is not None and self._is_whole(piece, record):
                records[piece.number] = record
        self._check(stage, records)
        rest = [(self.place, piece, *arguments) for piece in self.pieces if piece.number not in records]
        for record in self.thread_pool.run(function, rest):
            records[record.number] = record
            self._check(stage, records)
        if not sum(record.lines for record in records.values()):
            raise TextError("Found no line in the sources. Expected at least one. Check the files.")
        bad = _bad_lines(records.values())
        if len(bad) == sum(record.lines for record in records.values()):
            named = "; ".join(str(_bad_line(line)) for line in bad[:_NAMED_BAD_LINES])
            raise TextError(
                f"Found no good line among the {len(bad):,} of the sources: {named}. Expected lines of the form that "
                "was named. Check that these are the files that you mean."
            )
        return [records[piece.number] for piece in self.pieces]

    def _is_whole(self, piece: Piece, record: work.PieceRecord) -> bool:
        part = self.place.prepared / piece.part_name
        return record.part_bytes is None or (part.exists() and part.stat().st_size == record.part_bytes)

    def _check(self, stage: str, records: dict[int, work.PieceRecord]) -> None:
        lines = sum(record.lines for record in records.values())
        bad = _bad_lines(records.values())
        done_bytes = sum(piece.size_bytes for piece in self.pieces if piece.number in records)
        total_bytes = sum(piece.size_bytes for piece in self.pieces)
        self.on_progress(
            PreparationProgress(
                stage=stage, done_bytes=done_bytes, total_bytes=total_bytes, lines=lines, malformed=len(bad)
            )
        )
        if len(bad) > self.place.max_bad_lines:
            dead_letters = self.place.prepared.parent / DEAD_LETTER_NAME
            _write_dead_letters(dead_letters, bad)
            named = "; ".join(str(_bad_line(line)) for line in bad[:_NAMED_BAD_LINES])
            raise TextError(
                f"Found more than {self.place.max_bad_lines} malformed lines among {lines:,}: {named}. All that were "
                f"met are in {dead_letters}. Expected lines of the form that was named. Repair the sources, or raise "
                "--max-bad-lines to leave such lines out; the same command then goes on where it stopped."
            )


def _bad_lines(records: Iterable[work.PieceRecord]) -> list[dict[str, Any]]:
    """In the order of the pieces, so that who was faster does not show."""
    return [line for record in sorted(records, key=lambda record: record.number) for line in record.bad_lines]


def _bad_line(line: dict[str, Any]) -> BadLine:
    return BadLine(**{name: value for name, value in line.items() if name != "text"})


def _write_dead_letters(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    write_durably(path, "".join(json.dumps(line) + "\n" for line in lines))


def _finish(
    place: work.Workplace,
    folder: Path,
    identity: dict[str, Any],
    declaration: PreparedSet,
    pieces: tuple[Piece, ...],
    records: list[work.PieceRecord],
) -> dict[str, Any]:
    """Writes what stands beside the parts and puts the set in place. Returns the report."""
    report = build_report(place, declaration, pieces, records)
    bad = _bad_lines(records)
    if bad:
        _write_dead_letters(place.prepared / DEAD_LETTER_NAME, bad)
    write_durably(place.prepared / FILE_NAME, json.dumps(declaration.to_json(), indent=1))
    write_durably(place.prepared / REPORT_NAME, json.dumps(report, indent=1))
    write_durably(place.prepared / PAGE_NAME, render_page(report))
    _remove_leftovers(place, declaration, pieces, records, has_dead_letters=bool(bad))
    finish(place.prepared, folder, {"prepared_from": identity})
    return report


def _remove_leftovers(
    place: work.Workplace,
    declaration: PreparedSet,
    pieces: tuple[Piece, ...],
    records: list[work.PieceRecord],
    *,
    has_dead_letters: bool,
) -> None:
    """Half-written files of processes that were killed; they must not come into the set."""
    expected = {FILE_NAME, REPORT_NAME, PAGE_NAME, *([DEAD_LETTER_NAME] if has_dead_letters else [])}
    expected |= {
        piece.part_name for piece, record in zip(pieces, records, strict=True) if record.part_bytes is not None
    }
    expected |= {field.vocabulary for field in declaration.fields if field.vocabulary}
    for path in place.prepared.rglob("*"):
        if path.is_file() and path.relative_to(place.prepared).as_posix() not in expected:
            path.unlink()
    if not any((place.prepared / "vocabulary").iterdir()):
        (place.prepared / "vocabulary").rmdir()


class WorkerProcesses:
    """The processes that work; with one, this process itself."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise PrepareError(f"Found {workers} workers. Expected at least 1. Pass --workers 1 or more.")
        # Spawned, not forked: the parent may have threads.
        context = multiprocessing.get_context("spawn")
        with without_current_folder():
            self._pool = ProcessPoolExecutor(workers, context, _begin_worker) if workers > 1 else None

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._pool is not None:
            # What runs is let finish, since its record will be of use; what waits is not begun.
            self._pool.shutdown(cancel_futures=True)

    def run(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Makes all calls; yields the result of each as it is done, in any order.

        Raises:
          PrepareError: a process died.
        """
        if self._pool is None:
            for call in calls:
                yield function(*call)
            return
        try:
            # The first call begins the processes.
            with without_current_folder():
                waiting = [self._pool.submit(function, *call) for call in calls]
            for done in as_completed(waiting):
                yield done.result()
        except BrokenProcessPool as error:
            raise PrepareError(
                "Found that a process of the preparation died. Expected it to end in order; it may have been killed "
                "for its memory. Repeat the command to go on where it was, with fewer --workers."
            ) from error


def _begin_worker() -> None:
    """In a new process: Ctrl-C is the parent's business, and the end of the parent is the end of this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=_end_with, args=(sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
