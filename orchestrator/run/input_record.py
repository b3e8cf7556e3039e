"""`INPUT.json` and `input/`: the data files that a run began with and those that were accepted in their place since,
with what the job makes of them (`orchestrator.run.meaning`).

A changed file shows in its size, or in its etag or time of change as the filesystem reports it. For a set of `.npy`
files, those of all three files count. Content is not read again: a file that is rewritten with the same size and the
same time passes. Only in a working folder that Ray unpacked does a digest of the content stand for the time
(`data.files.file_version`). `INPUT.json` is written once, right after `RUN.json`. A run whose first start was killed in
between has none. It is checked by the fingerprint in `RUN.json`, and its next driver writes the file. The driver that
holds the lease writes an accepted change to `input/change-<number>.json`, before its first step on the new files. Later
starts compare with that. Which changes of files can be accepted is decided in `orchestrator.run.input_change`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.run_record import RunRecord, check_same
from podembed.orchestrator.events.reporter import print_sentence
from podembed.orchestrator.events.run import InputRecordDamaged
from podembed.orchestrator.run.input_change import FileRecord, InputChanged, InputRecord, judge
from podembed.orchestrator.run.meaning import MeaningRecord, changes_of_run, changes_of_shared_rows, meaning_of
from podembed.orchestrator.run.reference import newest_commit
from podembed.workers.data.input_files import InputFile
from podembed.workers.input.index import InputIndex, changed_files
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.sources import job_plan
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.records import Record, encode, from_document, read_document
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, unseal

INPUT_FILE = "INPUT.json"
CHANGES_FOLDER = "input"
_MAX_INPUT_BYTES = 256 << 20
_NAMED_FILES = 5
_FILE_LISTS = ("training", "evaluation", "vocabularies")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedChange:
    """Files that took the place of others.

    Attributes:
      step: the run's step from which on the new files were read.
      accepted_unix_s: wall clock, for people.
      changes: a phrase for every file that differed from those before.
      now: the files from there on.
    """

    step: int
    accepted_unix_s: float
    changes: tuple[str, ...]
    now: InputRecord


def write_input(
    store: Store, train: InputIndex, evaluation: InputIndex | None, meaning: MeaningRecord | None = None
) -> None:
    """Records the files of a new run; leaves the record of an existing one."""
    store.create_exclusive(INPUT_FILE, encode(record_of(train, evaluation, meaning)))


def _change_files(store: Store) -> list[str]:
    return [f"{CHANGES_FOLDER}/{name}" for name in sorted(store.children(CHANGES_FOLDER))]


def _read(store: Store, name: str, kind: type[Record]) -> Record:
    document = unseal(name, read_document(store, name, max_bytes=_MAX_INPUT_BYTES), max_bytes=_MAX_INPUT_BYTES)
    if kind is InputRecord:
        document = _filled(document)
    elif isinstance(document.get("now"), dict):
        document = document | {"now": _filled(document["now"])}
    return from_document(kind, name, document)


def _filled(document: dict[str, Any]) -> dict[str, Any]:
    """The fields of an `InputRecord`, with those that older versions did not write."""
    filled = {"meaning": None, **document}
    for name in _FILE_LISTS:
        if isinstance(files := filled.get(name), list):
            filled[name] = [{"extra_content": "", **file} if isinstance(file, dict) else file for file in files]
    return filled


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInput:
    """A run's record of its files.

    Attributes:
      began: the files that it began with; None if that is not known.
      accepted: in the order in which they were accepted.
      damaged: records that cannot be read.
    """

    began: InputRecord | None
    accepted: tuple[AcceptedChange, ...]
    damaged: tuple[DocumentRefused, ...] = ()
    is_newest_damaged: bool = False

    @property
    def newest(self) -> InputRecord | None:
        """The files that a start is compared with; None if that is not known."""
        if self.is_newest_damaged:
            return None
        return self.accepted[-1].now if self.accepted else self.began

    @property
    def meaning(self) -> MeaningRecord | None:
        """The meaning that a start is compared with; None if it was not recorded, or cannot be read."""
        return self.newest.meaning if self.newest else None

    def at(self, step: int) -> InputRecord | None:
        """The files that the step was read from, or will be."""
        return next((change.now for change in reversed(self.accepted) if change.step <= step), self.began)


def read_input(store: Store) -> RunInput:
    """The records, as far as they can be read: what data a run had is advice, which must not keep anybody from going
    on.
    """
    began, accepted, damaged = None, [], []
    try:
        began = _read(store, INPUT_FILE, InputRecord)
    except NameNotFound:
        pass  # The first start was killed before it wrote it.
    except DocumentRefused as error:
        damaged.append(error)
    is_newest_damaged = False
    for name in _change_files(store):
        try:
            accepted.append(_read(store, name, AcceptedChange))
            is_newest_damaged = False
        except DocumentRefused as error:
            damaged.append(error)
            is_newest_damaged = True
    return RunInput(began=began, accepted=tuple(accepted), damaged=tuple(damaged), is_newest_damaged=is_newest_damaged)


def write_input_again(
    store: Store, train: InputIndex, evaluation: InputIndex | None, meaning: MeaningRecord | None = None
) -> None:
    """Replaces a lost, damaged or older record of the files that the run began with. For the holder of the lease, with
    those very files.
    """
    with contextlib.suppress(NameNotFound):
        store.delete(INPUT_FILE)
    write_input(store, train, evaluation, meaning)


def differences(known: RunInput, train: InputIndex, evaluation: InputIndex | None) -> list[str] | None:
    """A phrase for each file that is not as the run knows it; None if the run has no record of its files."""
    if known.newest is None:
        return None
    newest = known.newest
    files = (*train.files, *train.vocabularies)
    return [
        *_changed((*newest.training, *newest.vocabularies), files),
        *_changed(newest.evaluation, evaluation.files if evaluation else ()),
    ]


def check_order(
    known: RunInput, train: InputIndex, evaluation: InputIndex | None, plan: LanePlan, *, step: int
) -> None:
    """Checks that the run can go on at a step with these files: a step counts their rows in their order.

    Raises:
      InputChanged: it cannot, whatever was accepted.
    """
    if known.newest is None:
        return
    judge(
        record_of(train, evaluation),
        began=known.newest,
        ordered_as=known.at(step) or known.newest,
        train=train,
        step=step,
        steps_per_epoch=plan.steps_per_epoch,
    )


def record_change(
    store: Store,
    changes: Sequence[str],
    train: InputIndex,
    evaluation: InputIndex | None,
    meaning: MeaningRecord | None = None,
    *,
    step: int,
) -> None:
    """Writes that these files are the run's from a step on. For the holder of the lease."""
    change = AcceptedChange(
        step=step, accepted_unix_s=time.time(), changes=tuple(changes), now=record_of(train, evaluation, meaning)
    )
    number = len(store.children(CHANGES_FOLDER)) + 1
    while not store.create_exclusive(f"{CHANGES_FOLDER}/change-{number:05d}.json", encode(change)):
        number += 1


def input_changed(store: Store, changed: Sequence[str], *, has_commit: bool) -> InputChanged:
    """The error that names the files, as far as they are known."""
    named = shortened(changed) or "names, sizes, times or row counts differ"
    what = (
        f"The data files of the run in {store.location} changed since it began: {named}. Expected the same, since the "
        "position in the data counts their rows."
    )
    accept = "pass --accept-input-change to podembed resume, or RunConfig(accept_input_change=True)."
    if not has_commit:
        return InputChanged(f"{without_commit(store, what)} If the rows are the same, {accept}")
    return InputChanged(what, f"Restore them. If the rows are the same, {accept}")


def without_commit(store: Store, what: str) -> InputChanged:
    """The error for a run in which nothing is trained yet: to begin again costs nothing."""
    return InputChanged(
        what,
        "The run has no commit, so nothing is lost with it. Begin a new one under another name (--name), or "
        f"remove {store.location} first. To go on with this one, restore the files.",
    )


def shortened(changed: Sequence[str]) -> str:
    """The first of some phrases and the number of the others."""
    more = f"; and {len(changed) - _NAMED_FILES} more" if len(changed) > _NAMED_FILES else ""
    return "; ".join(changed[:_NAMED_FILES]) + more


def record_of(train: InputIndex, evaluation: InputIndex | None, meaning: MeaningRecord | None = None) -> InputRecord:
    """The record of the files of a run."""
    return InputRecord(
        training=tuple(map(FileRecord.of, train.files)),
        evaluation=tuple(map(FileRecord.of, evaluation.files)) if evaluation else (),
        vocabularies=tuple(map(FileRecord.of, train.vocabularies)),
        meaning=meaning,
    )


def _changed(before: tuple[FileRecord, ...], now: tuple[InputFile, ...]) -> list[str]:
    phrases = changed_files([(file.path, file.size_bytes, file.version) for file in before], InputIndex(files=now))
    # The same file in other parts: a job that declares other id columns, or another number of rows in a block.
    found = {file.path: FileRecord.of(file) for file in now}
    for file in before:
        new = found.get(file.path)
        if new not in (None, file) and (new.size_bytes, new.version) == (file.size_bytes, file.version):
            phrases.append(f"{file.path} is read in other parts or columns")
    return phrases


def accepted_changes(
    store: Store,
    record: RunRecord,
    now: RunRecord,
    job: JobConfig,
    indexes: tuple[InputIndex, InputIndex | None],
    *,
    before_settings: JobConfig | None = None,
    accept: bool,
    allow_ancestor: bool,
    emit: Callable[[InputRecordDamaged], None] | None,
) -> tuple[str, ...]:
    """Accepted differences of the files, and of what the job makes of them, from the run's record.

    Args:
      record: record of the run.
      now: what would be recorded of a run that was created now.
      indexes: indexes of the files for training and evaluation.
      before_settings: the job with its old arguments where some change now, which is a way to accept what that does.

    Raises:
      InputChanged: they differ, or the newest record is damaged, and that was not accepted, or cannot be.
      RunMismatch: the run has no record of its files, and they have another number of rows.
    """
    known = read_input(store)
    for damage in known.damaged:
        (emit or print_sentence)(InputRecordDamaged(file=damage.name, found=damage.found))
    changed = differences(known, *indexes)
    if known.is_newest_damaged:
        changed = [f"nobody knows, since {known.damaged[-1].name}, the record of the files accepted last, is damaged"]
    elif changed is None and record.input_fingerprint != now.input_fingerprint:
        changed = ["names, sizes, times or row counts differ"]
    meant, edited = [], []
    if known.meaning is not None:
        meaning = meaning_of(job, indexes[0])
        meant = edited = changes_of_run(known.meaning, meaning)
        if before_settings is not None:
            edited = changes_of_run(known.meaning, meaning_of(before_settings, indexes[0]))
        if shared := changes_of_shared_rows(known.meaning, meaning):
            raise ConfigurationError(
                f"Found {'; '.join(shared)} in {store.location}. Expected the default that the run began with, since "
                "the first row of a bucket is shared or is a key's. Restore it, or begin a new run."
            )
    if edited and not accept:
        # First, since other columns and vocabularies follow from an edited job.
        raise _meaning_changed(store, [*edited, *(changed or ())])
    if changed and not accept:
        raise input_changed(store, changed, has_commit=_has_commit(store, allow_ancestor=allow_ancestor))
    if changed:
        newest = newest_commit(store, allow_ancestor=allow_ancestor)
        try:
            check_order(known, *indexes, job_plan(job, indexes[0]), step=newest.step if newest else 0)
        except InputChanged as error:
            raise error if newest else without_commit(store, error.what) from None
    check_same(record, now, store.location, free=frozenset({"input_fingerprint"}))
    return (*(changed or ()), *meant)


def _meaning_changed(store: Store, changes: Sequence[str]) -> InputChanged:
    told = "\n".join(f"  - {change}" for change in changes)
    return InputChanged(
        f"Found a job that makes something else of its columns and rows than the run in {store.location} was trained "
        f"with:\n{told}\nExpected the same, since rows would belong to other values and slots to another rule.",
        "Restore the job. If it is meant, pass --accept-input-change to podembed resume, or "
        "RunConfig(accept_input_change=True).",
    )


def _has_commit(store: Store, *, allow_ancestor: bool) -> bool:
    """Whether the run has a commit, or may have one that cannot be read, which must not be given up."""
    try:
        return bool(read_lineage(store, rebuild=allow_ancestor))
    except (NameNotFound, DocumentRefused):
        return True
