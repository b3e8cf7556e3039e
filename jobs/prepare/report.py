"""The report of a preparation: what was kept and dropped, in all and for each column, from the records of its
pieces.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from podembed.jobs.prepare import work
from podembed.jobs.prepare.pieces import Piece
from podembed.jobs.prepare.prepared_set import PreparedField, PreparedSet
from podembed.jobs.prepare.statistics import FieldTally, NumberTally, bin_edges, merged
from podembed.workers.data.unknown_values import LEAST_VALUES, LOOKED_AT, likely_cause


def build_report(
    place: work.Workplace, declaration: PreparedSet, pieces: Sequence[Piece], records: Sequence[work.PieceRecord]
) -> dict[str, Any]:
    """Everything that `report.json` says and `report.html` shows. lines = kept + malformed.

    Args:
      records: records of the written pieces, in their order.
    """
    sources = sorted({span.path: None for piece in pieces for span in piece.spans})
    return {
        "sources": sources,
        "source_bytes": sum(piece.size_bytes for piece in pieces),
        "parts": sum(record.part_bytes is not None for record in records),
        "part_bytes": sum(record.part_bytes or 0 for record in records),
        "rows_per_group": place.settings.rows_per_group,
        "lines": sum(record.lines for record in records),
        "kept": sum(record.kept for record in records),
        "malformed": sum(len(record.bad_lines) for record in records),
        "malformed_by_column": _malformed_by_column(records),
        "label": _number(declaration.label, [record.label for record in records]),
        "dense": [
            {"transform": column.transform, **_number(column.name, [record.dense[column.name] for record in records])}
            for column in declaration.dense
        ],
        "fields": _fields(place, declaration, pieces, records),
    }


def _malformed_by_column(records: Sequence[work.PieceRecord]) -> dict[str, int]:
    columns = [line["field"] for record in records for line in record.bad_lines]
    return {column: columns.count(column) for column in sorted(set(columns))}


def _number(name: str, tallies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = merged(NumberTally.from_json(tally) for tally in tallies)
    return {
        "name": name,
        "present": total.count,
        "missing": total.missing,
        "min": total.least,
        "max": total.most,
        "mean": total.total / total.count if total.count else None,
        "distribution": [[*bin_edges(at), count] for at, count in sorted(total.bins.items())],
    }


def _fields(
    place: work.Workplace, declaration: PreparedSet, pieces: Sequence[Piece], records: Sequence[work.PieceRecord]
) -> list[dict[str, Any]]:
    tallies = [FieldTally(num_rows=field.rows) for field in declaration.fields]
    for piece, record in zip(pieces, records, strict=True):
        with np.load(work.hits_file(place, piece), allow_pickle=False) as hits:
            for at, (field, tally) in enumerate(zip(declaration.fields, tallies, strict=True)):
                tally.merge(**record.fields[field.name], hits=hits[str(at)])
    return [_field(place, field, tally, records) for field, tally in zip(declaration.fields, tallies, strict=True)]


def _nothing_known(
    place: work.Workplace, field: PreparedField, tally: FieldTally, samples: int
) -> dict[str, str | None] | None:
    """An example of the values and the first one of the vocabulary, and the likely cause, of a field that has values
    and none in its vocabulary; None of others. So few values are not judged as in training.
    """
    if (
        field.vocabulary is None
        or not tally.examples
        or tally.unseen < LEAST_VALUES
        or samples > tally.missing + tally.unseen
    ):
        return None
    with open(place.prepared / field.vocabulary, encoding="utf-8", newline="\n") as file:
        lines = [line.rstrip("\n") for line in itertools.islice(file, LOOKED_AT)]
    lines = place.form.text_of(pa.array(lines, pa.string()).cast(place.form.value_type))
    cause = (
        likely_cause(tally.examples, lines) if lines else f"None occurs {field.min_count:,} times. Lower --min-count."
    )
    return {"value": tally.examples[0], "line": lines[0] if lines else None, "cause": cause}


def _field(
    place: work.Workplace, field: PreparedField, tally: FieldTally, records: Sequence[work.PieceRecord]
) -> dict[str, Any]:
    """`samples` = `missing` + `unseen` + `kept`; `values_*` and `most_frequent` where the values were counted."""
    samples = sum(record.kept for record in records)
    path = place.record(work.vocabulary_name(place, field.name))
    counted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        "name": field.name,
        "ids": field.ids,
        "rows": field.rows,
        "min_count": field.min_count if field.ids == "vocabulary" else None,
        "samples": samples,
        "missing": tally.missing,
        "unseen": tally.unseen,
        "nothing_known": _nothing_known(place, field, tally, samples),
        "kept": samples - tally.missing - tally.unseen,
        "values_seen": counted.get("values_seen"),
        "values_kept": counted.get("values_kept"),
        "most_frequent": counted.get("most_frequent"),
        "tracked_share": 1 / tally.stride,
        "distribution": [[2**k, rows, hits] for k, rows, hits in tally.frequencies()],
    }
