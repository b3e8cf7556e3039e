"""Opening a run: creating its folder or finding it there, and checking that job and data are those of the run.

An `OpenRun` is made at the end, when all of it is known to fit.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.api.config import ConfigurationError, WarmStart
from podembed.orchestrator.commit.run_record import RunRecord, TableRecord, check_same, find_run, open_or_create
from podembed.orchestrator.commit.writable_store import open_for_writing
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.reporter import print_sentence
from podembed.orchestrator.events.run import AccumulatorKept
from podembed.orchestrator.run.beginning import record_of
from podembed.orchestrator.run.input_record import accepted_changes, write_input
from podembed.orchestrator.run.job_settings import arguments_of, changes, check_change, with_changed_settings
from podembed.orchestrator.run.meaning import meaning_of
from podembed.orchestrator.run.reference import newest_commit
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.input.index import InputIndex
from podembed.workers.input.sources import indexes_of
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import check_initial_rows, choose_buckets, table_specs, takes_accumulator
from podembed.workers.storage.store import Store


def create_run(
    url: str,
    job: JobConfig,
    reference: JobReference | None,
    *,
    warm_start: WarmStart | None = None,
    single_writer: bool = False,
    accept_input_change: bool = False,
    take_over: bool = False,
    emit: Emit | None = None,
) -> OpenRun:
    """Creates the run's folder, or opens it if the same run is there.

    Args:
      warm_start: another run's commit to begin from.
      single_writer: accept a storage that cannot keep a second driver out.
      accept_input_change, take_over, emit: as `open_run`.

    Raises:
      RunMismatch: the folder holds another run.
      InputChanged: it holds the same run over files that changed since, or by a job whose rows mean something else.
      ConfigurationError: nothing can be written there, or the commit to begin from cannot be used.
      StorageError, InputError: the storage or the data cannot be used.
    """
    beginning = None
    job, reference, given = with_changed_settings(url, job, reference)
    # Data that cannot be used is refused before a folder is made.
    train_index, eval_index = indexes_of(job)
    if warm_start is not None:
        known = find_run(Store(url))
        beginning = record_of(warm_start, job, known, index=train_index, emit=emit or print_sentence)
    record = replace(_record(job, reference, train_index), warm_start=beginning)
    record = replace(record, job_arguments=given if given is not None else record.job_arguments)
    if any(table.initial_rows_path for table in job.tables) and find_run(Store(url)) is None:
        check_initial_rows(job)
    store = open_for_writing(url, single_writer=single_writer)
    found = find_run(store)
    if found is None:
        found = open_or_create(store, record)
        write_input(store, train_index, eval_index, meaning_of(job, train_index))
    return _opened(
        store,
        found,
        record,
        job,
        reference,
        (train_index, eval_index),
        take_over=take_over,
        accept_input_change=accept_input_change,
        emit=emit,
    )


def open_run(
    url: str,
    *,
    take_over: bool = False,
    accept_input_change: bool = False,
    allow_ancestor: bool = False,
    single_writer: bool = False,
    only_reads: bool = False,
    job_folder: str = "",
    settings: Mapping[str, Any] | None = None,
    emit: Emit | None = None,
) -> OpenRun:
    """Opens an existing run by its folder alone.

    Args:
      take_over: fence another driver that still holds the run.
      accept_input_change: go on although files have other names, sizes or times, if `orchestrator.run.input_change`
        finds that it can, and although the job means something else by its rows (`orchestrator.run.meaning`).
      allow_ancestor: if the newest commit is damaged, go back to the newest one that is not.
      single_writer: accept a storage that cannot keep a second driver out.
      only_reads: nothing will be written, so that the storage need not be tried out.
      job_folder: where the job's module may lie if it is not installed.
      settings: arguments of the job's function that are to change from now on; see `orchestrator.run.job_settings`.
      emit: callback that is told of a damaged record of the data files; None prints that instead.

    Raises:
      StoreCannotCreateExclusively: the storage cannot, and that was not accepted.
      ConfigurationError: there is no run, its job was given as a value and cannot be found by name, or its data
        changed.
      RunMismatch: the job's function no longer returns the job of the run.
    """
    store = Store(url)
    record = _record_in(store)
    if not only_reads:
        open_for_writing(url, single_writer=single_writer)
    arguments = arguments_of(record, store)
    reference = JobReference(function=record.job_function, arguments=arguments, folder=job_folder)
    job = reference.resolve()
    wanted, before = {**arguments, **(settings or {})}, None
    if changed := changes(arguments, wanted):
        reference = replace(reference, arguments=wanted)
        before, job = job, reference.resolve()
        check_change(before, job, changed)
    train_index, eval_index = indexes_of(job)
    found = _record(job, reference, train_index)
    found = replace(found, warm_start=record.warm_start, job_arguments=record.job_arguments)
    return _opened(
        store,
        record,
        found,
        job,
        reference,
        (train_index, eval_index),
        take_over=take_over,
        allow_ancestor=allow_ancestor,
        accept_input_change=accept_input_change,
        settings_before=arguments if changed else None,
        before_settings=before,
        emit=emit,
    )


def _opened(
    store: Store,
    record: RunRecord,
    now: RunRecord,
    job: JobConfig,
    reference: JobReference | None,
    indexes: tuple[InputIndex, InputIndex | None],
    *,
    take_over: bool,
    accept_input_change: bool,
    emit: Emit | None,
    allow_ancestor: bool = False,
    settings_before: Mapping[str, Any] | None = None,
    before_settings: JobConfig | None = None,
) -> OpenRun:
    """The run, once job and data are known to be those of its record.

    Args:
      record: record of the run.
      now: what would be recorded of a run that was created now.
      settings_before, before_settings: the job's arguments before some were changed, and the job that they give.
    """
    # A run keeps the buckets and the first accumulators that it was created with, whatever newer code would choose.
    accumulator = record.initial_accumulator_value
    if job.initial_accumulator_value != accumulator:
        if takes_accumulator(job):
            kept = AccumulatorKept(found=job.initial_accumulator_value, kept=accumulator)
            (emit or print_sentence)(kept)
        job = replace(job, initial_accumulator_value=accumulator)
    before_settings = before_settings and replace(before_settings, initial_accumulator_value=accumulator)
    reference = reference and replace(reference, initial_accumulator_value=accumulator)
    now = replace(now, tables=_cut_as(record.tables, now.tables, job), initial_accumulator_value=accumulator)
    # A capacity may have been raised since. What else differs is found by comparing.
    record = replace(record, tables=_grown(record.tables, now.tables, job))
    _require_room(store, now.tables, job, allow_ancestor=allow_ancestor)
    # Another job is named as such before its data is compared.
    check_same(record, now, store.location, free=frozenset({"input_fingerprint", "num_samples"}))
    input_changes = accepted_changes(
        store,
        record,
        now,
        job,
        indexes,
        before_settings=before_settings,
        accept=accept_input_change,
        allow_ancestor=allow_ancestor,
        emit=emit,
    )
    train_index, eval_index = indexes
    return OpenRun(
        url=store.location,
        store=store,
        record=record,
        job=job,
        reference=reference,
        train_index=train_index,
        eval_index=eval_index,
        take_over=take_over,
        allow_ancestor=allow_ancestor,
        input_changes=input_changes,
        settings_before=settings_before,
    )


def _cut_as(recorded: Sequence[TableRecord], tables: Sequence[TableRecord], job: JobConfig) -> tuple[TableRecord, ...]:
    """The job's tables with the numbers of buckets that the run has."""
    buckets = {table.name: table.num_buckets for table in recorded}
    try:
        return _tables(job, [buckets.get(table.name, table.num_buckets) for table in tables])
    except ValueError as error:
        # A capacity that the run's buckets cannot have.
        raise ConfigurationError(str(error)) from error


def _grown(recorded: Sequence[TableRecord], tables: Sequence[TableRecord], job: JobConfig) -> tuple[TableRecord, ...]:
    """The run's tables, with the rows of those whose capacity is larger now."""
    dynamic = {name for name, table in zip(job.table_names, job.tables, strict=True) if table.dynamic_keys is not None}
    rows = {table.name: table.num_rows for table in tables if table.name in dynamic}
    return tuple(replace(table, num_rows=max(table.num_rows, rows.get(table.name, 0))) for table in recorded)


def _require_room(store: Store, tables: Sequence[TableRecord], job: JobConfig, *, allow_ancestor: bool) -> None:
    """A capacity that was raised on the way may not be lowered below it by an edited job."""
    if all(table.dynamic_keys is None for table in job.tables):
        return
    head = newest_commit(store, allow_ancestor=allow_ancestor)
    committed = {table.name: table.num_rows for table in head.tables if table.is_dynamic} if head else {}
    for table in tables:
        if table.num_rows < (least := committed.get(table.name, 0)):
            raise ConfigurationError(
                f"Found a capacity of table '{table.name}' that makes {table.num_rows:,} rows in {store.location}. "
                f"Expected at least {least:,}, as its newest commit has. Declare the capacity that it went on with."
            )


def _record_in(store: Store) -> RunRecord:
    record = find_run(store)
    if record is None:
        raise ConfigurationError(
            f"Found no run in {store.location}. Expected a folder with RUN.json. `podembed train` prints the folder of "
            "its run."
        )
    if record.is_imported:
        raise ConfigurationError(
            f"Found imported tables without a job in {store.location}. Expected a run that was trained. Begin a new "
            f"one from it: podembed train --warm-start {store.location} --warm-start-rules @dense=reinit."
        )
    if not record.job_function:
        raise ConfigurationError(
            f"The run in {store.location} was started from Python with a job without a name. Expected a job function. "
            f"Run that program again with RunConfig(name=...) to go on."
        )
    return record


def _record(job: JobConfig, reference: JobReference | None, train_index: InputIndex) -> RunRecord:
    return RunRecord(
        run_id=uuid.uuid4().hex,
        created_unix_s=SYSTEM_CLOCK.wall_s(),
        seed=job.seed,
        num_lanes=job.num_lanes,
        batch_size=job.batch_size,
        tables=_tables(job, choose_buckets(job)),
        job_function=reference.function if reference else "",
        job_arguments=json.dumps(dict(reference.arguments) if reference else {}, sort_keys=True),
        num_samples=train_index.num_rows,
        input_fingerprint=hashlib.sha256(train_index.to_json().encode()).hexdigest(),
        staleness=job.staleness,
        wire_dtype=job.wire_dtype,
        overlap=job.overlap is not False,
        order=job.data.order,
        initial_accumulator_value=float(job.initial_accumulator_value),
    )


def _tables(job: JobConfig, num_buckets: Sequence[int]) -> tuple[TableRecord, ...]:
    return tuple(
        TableRecord(
            name=spec.name,
            num_rows=spec.num_rows,
            dim=spec.dim,
            num_buckets=spec.layout.num_buckets,
            slots={name: width for name, width in spec.stored_widths.items() if name != "rows"},
        )
        for spec in table_specs(job, num_buckets)
    )
