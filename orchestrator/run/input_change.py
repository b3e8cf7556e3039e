"""Which changes of the data a run survives: pure comparison of what is recorded of the files, then and now.

A step counts rows: that is all that a run remembers of its position. A change is therefore accepted only if three
things hold. Every step still stands for as many rows. No sample of the epoch under way comes twice or not at all. Equal
values still become equal rows of the tables. Everything else is refused, whatever flags are given. That rows kept their
place in files of the same shape cannot be seen here; it is what `--accept-input-change` vouches for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.meaning import MeaningRecord
from podembed.workers.columns.decode import kinds_of
from podembed.workers.columns.id_columns import NULLS
from podembed.workers.columns.vocabulary import load_vocabulary
from podembed.workers.data.input_files import InputFile
from podembed.workers.input.index import InputIndex


class InputChanged(ConfigurationError):
    """The data files are not those that the run began with.

    Attributes:
      what: was found and expected, without the remedy.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what} {remedy}".strip())
        self.what = what


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One data file or vocabulary at some time.

    Attributes:
      version: etag or time of change.
      row_groups: rows of its row groups in their order, such as `3x32768 1x100`; for a vocabulary its lines.
      content, extra_content: content as in `workers.data.input_files.InputFile`.
    """

    path: str
    size_bytes: int
    version: str
    num_rows: int
    row_groups: str
    content: str
    extra_content: str = field(default="", compare=False)

    @staticmethod
    def of(file: InputFile) -> FileRecord:
        return FileRecord(
            path=file.path,
            size_bytes=file.size_bytes,
            version=file.version,
            num_rows=file.num_rows,
            row_groups=_runs(file.row_group_rows),
            content=file.content,
            extra_content=file.extra_content,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """The files of training and evaluation, and the vocabularies of their id columns.

    Attributes:
      meaning: what the job makes of them; None in records of older versions.
    """

    training: tuple[FileRecord, ...]
    evaluation: tuple[FileRecord, ...]
    vocabularies: tuple[FileRecord, ...]
    meaning: MeaningRecord | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the training data."""
        return sum(file.num_rows for file in self.training)


def judge(
    now: InputRecord, *, began: InputRecord, ordered_as: InputRecord, train: InputIndex, step: int, steps_per_epoch: int
) -> None:
    """Accepts the files for a run that goes on at a step, or says why not.

    Args:
      began: what they take the place of.
      ordered_as: the files whose order the steps of the epoch up to this one were read in.
      train: part of `now` for training, for reading vocabularies again.

    Raises:
      InputChanged: steps would stand for other rows, or values for other rows of tables.
    """
    _judge_rows(now, began)
    _judge_columns(now, began)
    _judge_vocabularies(train, began)
    if step % steps_per_epoch:
        _judge_order(now, ordered_as, step=step, steps_per_epoch=steps_per_epoch)


def _judge_rows(now: InputRecord, began: InputRecord) -> None:
    if now.num_rows == began.num_rows:
        return
    before = {file.path: file.num_rows for file in began.training}
    found = {file.path: file.num_rows for file in now.training}
    differing = [
        f"{path} has {found.get(path, 0):,} rows, had {before.get(path, 0):,}"
        for path in sorted(before.keys() | found.keys())
        if found.get(path, 0) != before.get(path, 0)
    ]
    raise _refused(
        f"Found {now.num_rows:,} rows of training data: {'; '.join(differing[:3])}. Expected {began.num_rows:,}, as "
        "when the run began, since epochs and steps are counted in rows.",
        "begin a new run on the new data with the tables of this one (podembed train --warm-start)",
    )


def _judge_columns(now: InputRecord, began: InputRecord) -> None:
    for files, before in ((now.training, began.training), (now.evaluation, began.evaluation)):
        _judge_kinds("id", [(file.path, file.content) for file in files], {file.content for file in before})
        # Older runs did not record them.
        known = {file.extra_content for file in before} - {""}
        _judge_kinds("extra", [(file.path, file.extra_content) for file in files], known)


def _judge_kinds(which: str, files: Sequence[tuple[str, str]], known: Collection[str]) -> None:
    kinds: dict[str, set[str]] = {}
    for content in known:
        for column, kind in kinds_of(content).items():
            kinds.setdefault(column, set()).add(kind)

    def fits(content: str) -> bool:
        # Columns without a value in a file fit all others. An extra column that is new is told with the job's edits.
        found = kinds_of(content)
        new = {NULLS} if which == "extra" else set()
        return bool(found) and all(
            kind == NULLS or kind in (had := kinds.get(column, new)) or had == {NULLS} for column, kind in found.items()
        )

    changed = [(path, content) for path, content in files if known and content not in known and not fits(content)]
    if changed:
        path, content = changed[0]
        raise _refused(
            f"Found the {which} columns of {path} as {content}. Expected {' or '.join(sorted(known))}, as when the run "
            "began, since numbers, text and times become other rows of a table, or other numbers.",
            "write the columns in their old types",
        )


def _judge_vocabularies(train: InputIndex, began: InputRecord) -> None:
    for file, before in zip(train.vocabularies, began.vocabularies, strict=False):
        if file.content == before.content:
            continue
        vocabulary = load_vocabulary(file.path)
        if vocabulary.num_values >= before.num_rows and vocabulary.digest(before.num_rows) == before.content:
            continue
        raise _refused(
            f"Found other values in the first {before.num_rows:,} lines of the vocabulary {file.path}. Expected them "
            "as they were, and new ones behind them, since a line is a row of a trained table.",
            "append new values at its end",
        )


def _judge_order(now: InputRecord, ordered_as: InputRecord, *, step: int, steps_per_epoch: int) -> None:
    """Files may have other names, but their row groups must come in one order with as many rows in each."""
    found, before = _row_groups(now), _row_groups(ordered_as)
    same = [left[1] == right[1] for left, right in zip(found, before, strict=False)]
    if len(found) == len(before) and all(same):
        return
    # With equal sums, lists that differ do so before the shorter one ends.
    path, num_rows = found[same.index(False)]
    epoch_start = step - step % steps_per_epoch
    raise _refused(
        f"Found {len(found):,} row groups, number {same.index(False) + 1} of {num_rows:,} rows in {path}, at step "
        f"{step}, within an epoch of {steps_per_epoch} steps. Expected {len(before):,} of the sizes that they had. An "
        "epoch is an order of row groups, so some rows would come twice in it and others not at all.",
        f"change them between two epochs: train on the old files to step {epoch_start + steps_per_epoch} (--max-steps) "
        "first",
    )


def _refused(what: str, remedy: str) -> InputChanged:
    return InputChanged(what, f"Restore the files, or {remedy}.")


def _runs(row_group_rows: tuple[int, ...]) -> str:
    """Such as `3x32768 1x100`."""
    return " ".join(f"{len(list(run))}x{rows}" for rows, run in groupby(row_group_rows))


def _row_groups(record: InputRecord) -> list[tuple[str, int]]:
    """(path, rows) of every row group of the training data that has rows, in the order of
    `InputIndex.row_group_rows`.
    """
    groups: list[tuple[str, int]] = []
    for file in record.training:
        for run in file.row_groups.split():
            count, _, rows = run.partition("x")
            if int(rows):
                groups += [(file.path, int(rows))] * int(count)
    return groups
