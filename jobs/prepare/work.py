"""What one process does of a preparation: count the values of a piece, make the vocabulary of a field, write the part
of a piece.

Each of these is a function of its arguments and of files that are finished. It leaves its result under a fixed name,
and writes its record last, whole. Where there is a record, the work is done. Work that was cut off is simply done
again, with the same bytes.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.jobs.finished_folder import write_durably
from podembed.jobs.prepare.forms import ParsedBlock, TextForm
from podembed.jobs.prepare.pieces import Piece
from podembed.jobs.prepare.prepared_set import PreparedField
from podembed.jobs.prepare.rows_of_values import (
    OTHER_ROW,
    HashedIds,
    RowIds,
    VocabularyIds,
    choose_vocabulary,
    counts_of,
    read_vocabulary,
    summed,
)
from podembed.jobs.prepare.settings import PrepareSettings
from podembed.jobs.prepare.statistics import MOST_EXAMPLES, FieldTally, NumberTally
from podembed.jobs.text.criteo import BadLine

_MOST_FREQUENT = 10
_DEAD_LETTER_TEXT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where a preparation works, and what all its processes need to know.

    Attributes:
      records: folder of records and of what is needed only until the end.
      prepared: folder that becomes the prepared set.
      max_bad_lines: a piece with more of them is given up.
    """

    records: Path
    prepared: Path
    settings: PrepareSettings
    form: TextForm
    max_bad_lines: int

    def record(self, name: str) -> Path:
        return self.records / f"{name}.json"

    def vocabulary(self, field_name: str) -> Path:
        return self.prepared / "vocabulary" / f"{field_name}.txt"


@dataclass(slots=True)
class PieceRecord:
    """What is known of a piece after it was read. Mutated while it is.

    Attributes:
      is_complete: False if the piece was given up because of malformed lines; then it has no record on disk.
      part_bytes: size of the Parquet file, None where there is none.
      bad_lines: bad lines as they stand in the dead-letter file.
    """

    number: int
    lines: int = 0
    kept: int = 0
    is_complete: bool = True
    part_bytes: int | None = None
    bad_lines: list[dict[str, Any]] = field(default_factory=list)
    label: dict[str, Any] = field(default_factory=dict)
    dense: dict[str, dict[str, Any]] = field(default_factory=dict)
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)


class _TooManyBadLines(Exception):
    """The piece is not worth going on with."""


# ---------------------------------------------------------------------- counting, for vocabularies


def counts_name(piece: Piece) -> str:
    """Name of the record of a counted piece."""
    return f"counts-{piece.number:05d}"


def count_piece(place: Workplace, piece: Piece) -> PieceRecord:
    """Counts the values of every field that gets a vocabulary, into one file a field."""
    record = PieceRecord(number=piece.number)
    names = [plan.name for plan in place.settings.fields if plan.ids == "vocabulary"]
    counts: dict[str, list[pa.Table]] = {name: [] for name in names}
    try:
        for parsed in _parsed_blocks(place, piece, record):
            for name in names:
                counts[name].append(counts_of([parsed.values[name]]))
    except _TooManyBadLines:
        return record
    empty = counts_of([pa.array([], place.form.value_type)])
    for name in names:
        with _placed(counts_file(place, piece, name)) as path:
            pq.write_table(summed(pa.concat_tables([empty, *counts[name]])), path)
    write_durably(place.record(counts_name(piece)), json.dumps(asdict(record)))
    return record


def counts_file(place: Workplace, piece: Piece, field_name: str) -> Path:
    """Parquet of `value`, `count`: those of one field in one piece."""
    # By position, since a column of CSV may have a name that no file can have.
    position = [plan.name for plan in place.settings.fields].index(field_name)
    return place.records / f"counts-{piece.number:05d}-{position}.parquet"


def make_vocabulary(place: Workplace, field_name: str, pieces: tuple[Piece, ...]) -> dict[str, Any]:
    """Adds up the counts of one field over all pieces and writes its vocabulary file. Returns its record."""
    plan = next(plan for plan in place.settings.fields if plan.name == field_name)
    counts = summed(pa.concat_tables([pq.read_table(counts_file(place, piece, field_name)) for piece in pieces]))
    chosen = choose_vocabulary(counts, min_count=plan.min_count, max_rows=plan.max_rows)
    write_durably(place.vocabulary(field_name), "".join(f"{value}\n" for value in chosen.values.to_pylist()))
    record = {
        "values_seen": chosen.num_seen,
        "values_kept": len(chosen.values),
        "most_frequent": list(
            zip(
                place.form.text_of(chosen.values[:_MOST_FREQUENT]), chosen.counts[:_MOST_FREQUENT].tolist(), strict=True
            )
        ),
    }
    write_durably(place.record(vocabulary_name(place, field_name)), json.dumps(record))
    return record


def vocabulary_name(place: Workplace, field_name: str) -> str:
    """Name of the record of a finished vocabulary."""
    return f"vocabulary-{[plan.name for plan in place.settings.fields].index(field_name)}"


# ---------------------------------------------------------------------- writing


def part_record_name(piece: Piece) -> str:
    """Name of the record of a written piece."""
    return f"part-{piece.number:05d}"


def write_piece(place: Workplace, piece: Piece, fields: tuple[PreparedField, ...]) -> PieceRecord:
    """Writes the Parquet file of a piece, with final ids, and counts what is in it."""
    record = PieceRecord(number=piece.number)
    label = NumberTally()
    dense = {column.name: NumberTally() for column in place.settings.dense}
    tallies = {f.name: FieldTally(num_rows=f.rows) for f in fields}
    ids = _row_ids(place.prepared, fields)

    def tables() -> Iterator[pa.Table]:
        for parsed in _parsed_blocks(place, piece, record):
            label.add(parsed.label)
            columns = {place.settings.label: parsed.label}
            for name, tally in dense.items():
                tally.add(parsed.dense[name])
                columns[name] = parsed.dense[name]
            for name, tally in tallies.items():
                rows = ids[name].rows(parsed.values[name])
                tally.add(rows, missing=parsed.values[name].null_count)
                if len(tally.examples) < MOST_EXAMPLES and (is_unseen := rows == OTHER_ROW).any():
                    unseen = parsed.values[name].filter(pa.array(is_unseen)).drop_null()[:MOST_EXAMPLES]
                    tally.examples = [*tally.examples, *place.form.text_of(unseen)][:MOST_EXAMPLES]
                columns[name] = pa.array(rows)
            yield pa.table(columns)

    try:
        record.part_bytes = _write_part(place.prepared / piece.part_name, tables(), place, record)
    except _TooManyBadLines:
        return record
    with _placed(hits_file(place, piece)) as path, open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **{f"{at}": tally.hits for at, tally in enumerate(tallies.values())})
    record.label = label.to_json()
    record.dense = {name: tally.to_json() for name, tally in dense.items()}
    record.fields = {
        name: {"missing": t.missing, "unseen": t.unseen, "examples": t.examples} for name, t in tallies.items()
    }
    write_durably(place.record(part_record_name(piece)), json.dumps(asdict(record)))
    return record


def hits_file(place: Workplace, piece: Piece) -> Path:
    """The arrays `FieldTally.hits` of one piece, by the field's position."""
    return place.records / f"hits-{piece.number:05d}.npz"


@lru_cache(maxsize=1)
def _row_ids(prepared: Path, fields: tuple[PreparedField, ...]) -> dict[str, RowIds]:
    """One for each field; kept by the process, since vocabularies can be large."""
    ids: dict[str, RowIds] = {}
    for field_ in fields:
        if field_.vocabulary is None:
            ids[field_.name] = HashedIds(field_.rows, field_.salt)
        else:
            ids[field_.name] = VocabularyIds(read_vocabulary(prepared / field_.vocabulary))
    return ids


def _write_part(path: Path, tables: Iterator[pa.Table], place: Workplace, record: PieceRecord) -> int | None:
    """Row groups of one size; only the last one is smaller. Returns the size of the file, or None if there is no
    row.
    """
    writer: pq.ParquetWriter | None = None
    with _placed(path) as temporary:
        try:
            for group in row_groups(tables, place.settings.rows_per_group):
                writer = writer or pq.ParquetWriter(temporary, group.schema)
                writer.write_table(group, row_group_size=place.settings.rows_per_group)
                record.kept += group.num_rows
        finally:
            if writer is not None:
                writer.close()
    return path.stat().st_size if record.kept else None


def row_groups(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """The rows of all tables, `num_rows` at a time; the last time what is left."""
    pending: list[pa.Table] = []
    for table in tables:
        pending.append(table)
        if sum(part.num_rows for part in pending) >= num_rows:
            rows = pa.concat_tables(pending)
            whole = rows.num_rows - rows.num_rows % num_rows
            for start in range(0, whole, num_rows):
                yield rows.slice(start, num_rows)
            pending = [rows.slice(whole)]
    rest = pa.concat_tables(pending) if pending else None
    if rest is not None and rest.num_rows:
        yield rest


@contextmanager
def _placed(path: Path) -> Iterator[Path]:
    """A temporary path whose file, if the block writes one and succeeds, takes the place of `path` durably."""
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:12]}"
    try:
        yield temporary
        if temporary.exists():
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------- reading


def _parsed_blocks(place: Workplace, piece: Piece, record: PieceRecord) -> Iterator[ParsedBlock]:
    """The blocks of a piece, without headers; counts lines and gathers malformed ones in the record.

    Raises:
      _TooManyBadLines: there are more than a whole preparation may have; the record is then incomplete.
    """
    for span in piece.spans:
        line = 0  # of the span, counted from 0
        lines_before = _once(span.lines_before)
        for block in span.blocks():
            if span.start == 0 and line < place.form.header_lines:
                block = block[block.index(b"\n") + 1 :]
                line = place.form.header_lines
            parsed = place.form.parse(block, max_faults=place.max_bad_lines - len(record.bad_lines))
            for at, fault, text in parsed.faults:
                bad = BadLine(
                    file=span.path,
                    line=lines_before() + line + at + 1,
                    field=fault.field,
                    found=fault.found,
                    reason=fault.reason,
                )
                shown = text[:_DEAD_LETTER_TEXT_BYTES].decode("utf-8", "backslashreplace")
                record.bad_lines.append(asdict(bad) | {"text": shown})
                if len(record.bad_lines) > place.max_bad_lines:
                    record.lines += at + 1
                    record.is_complete = False
                    raise _TooManyBadLines
            record.lines += parsed.num_lines
            line += parsed.num_lines
            yield parsed


def _once(compute: Callable[[], int]) -> Callable[[], int]:
    """The same value, computed at the first call: counting the lines before a span reads the file again."""
    known: list[int] = []

    def value() -> int:
        if not known:
            known.append(compute())
        return known[0]

    return value


def read_record(path: Path) -> PieceRecord | None:
    """A piece's record, or None if it is not there."""
    return PieceRecord(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
