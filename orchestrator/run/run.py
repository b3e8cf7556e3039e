"""`OpenRun`: a run's folder, its record, its job and its data, opened and checked; and the commits in it.

The folder is the only truth about a run. What is here stands between the driver's loop and the files: creating or
opening the record, leases, the commit that a generation starts from, and putting together a manifest from what the
hosts wrote.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError, WarmStart
from podembed.orchestrator.api.errors import JobFailed
from podembed.orchestrator.api.keep_policies import Committed
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.keep import read_committed
from podembed.orchestrator.commit.lease import Holder, Lease, acquire, read_lineage
from podembed.orchestrator.commit.manifest import Manifest, commit_file, commit_name, parse_commit_name
from podembed.orchestrator.commit.run_record import (
    RUN_FILE,
    RunRecord,
    TableRecord,
    check_same,
    find_run,
    open_or_create,
)
from podembed.orchestrator.commit.storage_wait import at_once
from podembed.orchestrator.commit.writable_store import open_for_writing
from podembed.orchestrator.run.beginning import Beginning, open_beginning, record_of
from podembed.orchestrator.run.input_record import (
    INPUT_FILE,
    check_order,
    differences,
    input_changed,
    read_input,
    record_change,
    shortened,
    write_input,
    write_input_again,
)
from podembed.orchestrator.run.job_settings import changes, check_change, newest_settings, record_settings
from podembed.orchestrator.run.policy_record import record_policies
from podembed.orchestrator.run.warm_start import parse_rules, refuse_hashed_growth
from podembed.workers.checkpoint.files import TableFiles, assemble_delta, assemble_table
from podembed.workers.checkpoint.shard import ShardReceipt, table_plan
from podembed.workers.device.process import DenseReceipt
from podembed.workers.input.index import check_alike
from podembed.workers.input.reader import InputIndex, LanePlan, build_index
from podembed.workers.input.sources import job_plan
from podembed.workers.job.job import JobConfig, JobReference
from podembed.workers.job.tables import choose_buckets, table_specs
from podembed.workers.storage.errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, parse_strictly

Receipts = tuple[Sequence[ShardReceipt], Sequence[DenseReceipt]]


class ReplicasDiffer(RuntimeError):
    """The dense parameters of two hosts are no longer equal; nothing was committed."""


class StateSpoilt(JobFailed):
    """A row or a dense parameter is not finite any more, which the next loss may show; nothing was committed."""


@dataclass(slots=True)
class OpenRun:
    """One run. Mutated by `acquire`: `generation`, `input_changes`, and the lease of that generation.

    Attributes:
      url: the folder, absolute.
      record: what the run is.
      job: resolved.
      reference: how workers get the job, if it has a name; otherwise it is sent as a value.
      policies: recorded with each generation, so that a resumed run keeps the same commits; None records nothing.
      settings_before: the job's arguments before those that were changed for this call, which `acquire` records; None
        if they stay.
      input_changes: how the data files differ from those that the run knows; accepted, and recorded by `acquire`.
    """

    url: str
    store: Store
    record: RunRecord
    job: JobConfig
    reference: JobReference | None
    train_index: InputIndex
    eval_index: InputIndex | None
    take_over: bool = False
    allow_ancestor: bool = False
    input_changes: list[str] = field(default_factory=list)
    notice: Callable[[str], None] = print
    settings_before: Mapping[str, Any] | None = None
    generation: int = 0
    policies: CheckpointConfig | None = None
    clock: Clock = SYSTEM_CLOCK
    _lease: Lease | None = None
    _submission: str = field(default_factory=lambda: os.environ.get("RAY_JOB_SUBMISSION_ID") or uuid.uuid4().hex[:12])

    @property
    def job_for_workers(self) -> JobConfig | JobReference:
        return self.reference or self.job

    @property
    def table_buckets(self) -> tuple[int, ...]:
        """The number of buckets of each table, in the job's order."""
        buckets = {table.name: table.num_buckets for table in self.record.tables}
        return tuple(buckets[name] for name in self.job.table_names)

    def acquire(self, patiently: Callable[[Callable[[], Any]], Any] = at_once) -> Lease:
        """Claims the next generation.

        Args:
          patiently: asks the storage; may ask again if it is away.

        Raises:
          RunIsHeld, Fenced: another driver is at work.
          RunVanished: what this driver wrote for the generation before is gone.
          InputChanged: the commit to start from stands at a step that means other rows with the files as they are now.
        """
        lease = acquire(
            self.store,
            holder=Holder.current(self._submission),
            take_over=self.take_over,
            held=self.generation,
            held_files=self._lease.own_files if self._lease else None,
            rebuild=self.allow_ancestor,
            patiently=patiently,
            unix_s=self.clock.wall_s,
            choose_base=lambda newest: checkpoint.newest_loadable(
                self.store,
                newest,
                allow_ancestors=self.allow_ancestor,
                on_skip=lambda name, why: self.notice(
                    f"commit {name} is damaged and passed over, its steps are done again: {why}"
                ),
            ),
        )
        if self._lease is not None and self._lease.head not in (None, lease.head):
            self._tell_lost(self._lease.head, lease.head)
        self.generation, self._lease = lease.generation, lease
        try:
            patiently(lambda: self._settle_input(self.head_step(lease)))
            patiently(lambda: self._settle_settings(lease))
            if self.policies is not None:
                patiently(partial(record_policies, self.store, self.policies, generation=lease.generation))
        except BaseException:
            with contextlib.suppress(StorageError, OSError):
                lease.release()
            raise
        return lease

    def _tell_lost(self, acknowledged: str, found: str | None) -> None:
        """Says that the newest commit is older than one that this driver has made. A newer one is its own, whose answer
        was lost.
        """
        if found is None or (parse_commit_name(found) or (0, 0)) < (parse_commit_name(acknowledged) or (0, 0)):
            self.notice(
                f"commit {acknowledged} has VANISHED since it was made: {commit_file(acknowledged)} is not there. "
                "Training goes back to "
                f"{found or 'the first step'}; restore the file from a copy to keep its steps"
            )

    def _settle_settings(self, lease: Lease) -> None:
        """Records changed arguments of the job, once."""
        if self.settings_before is None or self.reference is None:
            return
        step, after = self.head_step(lease), self.reference.arguments
        record = record_settings(self.store, self.settings_before, after, generation=lease.generation, step=step)
        self.notice(f"settings changed from step {step} on: {record.describe()}")
        self.settings_before = None

    def _settle_input(self, step: int) -> None:
        """Checks that the run can go on at a step with its files, and records those that were accepted.

        Raises:
          InputChanged: the step stands for other rows now.
        """
        known = read_input(self.store)
        if not self.input_changes and not known.accepted:
            if known.damaged:
                # The files are those of the record's fingerprint, so what is written is what stood there.
                write_input_again(self.store, self.train_index, self.eval_index)
                self.notice(
                    f"{INPUT_FILE} was damaged; it was written again from the data files, which are those that the run "
                    "began with"
                )
            return
        check_order(known, self.train_index, self.eval_index, self.input_plan, step=step)
        if self.input_changes:
            record_change(self.store, self.input_changes, self.train_index, self.eval_index, step=step)
            self.notice(f"data files changed, accepted from step {step} on: {shortened(self.input_changes)}")
            self.input_changes = []

    @property
    def input_plan(self) -> LanePlan:
        return job_plan(self.job, self.train_index)

    @property
    def total_steps(self) -> int:
        """Of all epochs."""
        return self.input_plan.steps_per_epoch * self.job.num_epochs

    def load_base(self, lease: Lease) -> Manifest | None:
        """The commit that the lease starts from. Says so if other versions wrote it: results may then differ in their
        last bits.
        """
        base = checkpoint.load(self.store, lease.head) if lease.head else None
        now = _versions()
        changed = {name: (base.versions.get(name), now[name]) for name in now} if base else {}
        told = ", ".join(f"{name} {was} (now {version})" for name, (was, version) in changed.items() if was != version)
        if told:
            self.notice(f"commit {lease.head} was written with {told}; the run may not repeat bit by bit from here")
        return base

    def committed(self, lease: Lease) -> list[Committed]:
        """What the save policies know of the commits that the lease's generation follows; those that cannot be read are
        left out.
        """
        names = read_lineage(self.store) if lease.head else ()
        found = []
        for name in names:
            with contextlib.suppress(StorageError):
                found += read_committed(self.store, [name])
        return found

    def beginning(self) -> Beginning | None:
        """What a generation without a commit starts from; None for initial values.

        Raises:
          ConfigurationError: the commit that this run began from is gone.
        """
        record = self.record.warm_start
        return open_beginning(record, table_specs(self.job, self.table_buckets)) if record else None

    def head_step(self, lease: Lease) -> int:
        """The step of the lease's last acknowledged commit, 0 before the first."""
        parsed = parse_commit_name(lease.head) if lease.head else None
        return parsed[0] if parsed else 0

    def manifest(
        self,
        lease: Lease,
        *,
        step: int,
        parent: Manifest | None,
        placement: Mapping[str, tuple[int, ...]],
        num_hosts: int,
        receipts: Receipts,
        metrics: Mapping[str, float] | None = None,
        failed_saves: int = 0,
    ) -> Manifest:
        """Puts together the manifest of a save that all workers have written.

        Args:
          receipts: what they wrote: of the hosts, and of the device processes.
          metrics: of an evaluation of this very state.
          failed_saves: saves that failed since the parent.

        Raises:
          ReplicasDiffer: the dense replicas are not bitwise equal.
          StateSpoilt: a row or a dense parameter is not finite any more.
        """
        attempt = commit_name(step=step, generation=lease.generation)
        shards, replicas = receipts
        _require_numbers(shards, replicas, step=step, has_parent=parent is not None)
        if len({replica.digest for replica in replicas}) != 1:
            raise ReplicasDiffer(
                f"Found dense replicas with digests {[replica.digest[:12] for replica in replicas]} at step {step}. "
                "Expected equal ones. "
                f"The model or the optimizer is not deterministic, or a host computes wrongly; the last commit stands."
            )
        return Manifest(
            run_id=self.record.run_id,
            step=step,
            generation=lease.generation,
            parent=parent.name if parent else None,
            created_unix_s=self.clock.wall_s(),
            hosts=num_hosts,
            cursor={"step": step},
            tables=self._assemble(attempt, shards, parent),
            dense=tuple(file for replica in replicas for file in replica.files),
            placement=dict(placement),
            counters={"samples": self._samples(step)} | ({"failed_saves": failed_saves} if failed_saves else {}),
            metrics=dict(metrics or {}),
            versions=_versions(),
        )

    def remove_attempt(self, attempt: str) -> None:
        """Deletes the files of a save that did not become a commit.

        Raises:
          StorageError, OSError: some of them may be left.
        """
        self.store.delete_folder(f"data/{attempt}")

    def _samples(self, step: int) -> int:
        """Samples of the first `step` steps, each counted once an epoch, padding left out and malformed rows
        counted.
        """
        return self.input_plan.rows_before(step)

    def _assemble(
        self, attempt: str, shards: Sequence[ShardReceipt], parent: Manifest | None
    ) -> tuple[TableFiles, ...]:
        before = {table.name: table for table in parent.tables} if parent else {}
        tables = []
        for at, spec in enumerate(table_specs(self.job, self.table_buckets)):
            parts = [shard.tables[at] for shard in shards]
            buckets = [bucket for part in parts for bucket in part.buckets]
            if shards[0].is_delta:
                changed = [changed for part in parts for changed in part.parts]
                tables.append(assemble_delta(before[spec.name], attempt, changed, buckets))
            else:
                arrays = next(part.arrays for part in parts if part.arrays)
                tables.append(assemble_table(table_plan(spec, attempt), arrays, buckets))
        return tuple(tables)


def _require_numbers(
    shards: Sequence[ShardReceipt], replicas: Sequence[DenseReceipt], *, step: int, has_parent: bool
) -> None:
    """Refuses a state that no later step can mend.

    Raises:
      StateSpoilt: naming rows, or else a dense parameter.
    """
    spoilt = next((shard.spoilt for shard in shards if shard.spoilt), None)
    key = next((replica.spoilt for replica in replicas if replica.spoilt), None)
    if spoilt is None and key is None:
        return
    stands = "The last commit, from before, stands." if has_parent else "Nothing is committed yet."
    if spoilt is not None:
        values = "" if has_parent else ", and at the tables' first values"
        raise StateSpoilt(
            f"Found {spoilt.describe()} not finite after {step} steps. Expected numbers. {stands} Lower the learning "
            "rates, clip the gradients of "
            f"the rows (clipvalue), or look for extreme inputs{values}."
        )
    raise StateSpoilt(
        f"Found the dense parameter '{key}' not finite after {step} steps. Expected numbers. {stands} Lower the "
        "learning rates, clip the dense "
        f"gradients (optax.clip_by_global_norm), or look for extreme inputs."
    )


def create_run(
    url: str,
    job: JobConfig,
    reference: JobReference | None,
    *,
    warm_start: WarmStart | None = None,
    single_writer: bool = False,
    accept_input_change: bool = False,
) -> OpenRun:
    """Creates the run's folder, or opens it if the same run is there.

    Args:
      warm_start: another run's commit to begin from.
      single_writer: accept a storage that cannot keep a second driver out.
      accept_input_change: as `open_run`.

    Raises:
      RunMismatch: the folder holds another run.
      InputChanged: it holds the same run over files that changed since.
      ConfigurationError: nothing can be written there, or the commit to begin from cannot be used.
      StorageError, InputError: the storage or the data cannot be used.
    """
    beginning = None
    job, reference, given = _with_changed_settings(url, job, reference)
    if warm_start is not None:
        beginning = record_of(warm_start, table_specs(job, choose_buckets(job)), find_run(Store(url)))
        refuse_hashed_growth(job, parse_rules(warm_start.rules))
    # Data that cannot be used is refused before a folder is made.
    train_index, eval_index = _indexes(job)
    record = replace(_record(job, reference, train_index), warm_start=beginning)
    record = replace(record, job_arguments=given if given is not None else record.job_arguments)
    store = open_for_writing(url, single_writer=single_writer)
    found = find_run(store)
    if found is None:
        found = open_or_create(store, record)
        write_input(store, train_index, eval_index)
    # Another job is named as such before its data is compared.
    check_same(found, record, store.location, free=frozenset({"input_fingerprint", "num_samples"}))
    run = OpenRun(
        url=store.location,
        store=store,
        record=found,
        job=job,
        reference=reference,
        train_index=train_index,
        eval_index=eval_index,
    )
    _compare_input(run, record, accept=accept_input_change)
    return run


def _with_changed_settings(
    url: str, job: JobConfig, reference: JobReference | None
) -> tuple[JobConfig, JobReference | None, str | None]:
    """A program that is started again with the arguments that its run began with goes on with those that were changed
    since.

    Returns:
      The job, its reference, and the arguments that the run began with, as its record has them; None where nothing was
      changed.
    """
    store = Store(url)
    record = find_run(store) if reference is not None else None
    settings = newest_settings(store) if record is not None else None
    if record is None or reference is None or settings is None:
        return job, reference, None
    if json.dumps(dict(reference.arguments), sort_keys=True) not in (record.job_arguments, settings.job_arguments):
        return job, reference, None
    reference = replace(reference, arguments=settings.arguments)
    return reference.resolve(), reference, record.job_arguments


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
) -> OpenRun:
    """Opens an existing run by its folder alone.

    Args:
      take_over: fence another driver that still holds the run.
      accept_input_change: go on although files have other names, sizes or times, if `orchestrator.run.input_change`
        finds that it can.
      allow_ancestor: if the newest commit is damaged, go back to the newest one that is not.
      single_writer: accept a storage that cannot keep a second driver out.
      only_reads: nothing will be written, so that the storage need not be tried out.
      job_folder: where the job's module may lie if it is not installed.
      settings: arguments of the job's function that are to change from now on; see `orchestrator.run.job_settings`.

    Raises:
      StoreCannotCreateExclusively: the storage cannot, and that was not accepted.
      ConfigurationError: there is no run, its job was given as a value and cannot be found by name, or its data
        changed.
      RunMismatch: the job's function no longer returns the job of the run.
    """
    store = Store(url)
    record = find_run(store)
    if record is None:
        raise ConfigurationError(
            f"Found no run in {store.location}. Expected a folder with RUN.json. `podembed train` prints the folder of "
            "its run."
        )
    if not record.job_function:
        raise ConfigurationError(
            f"The run in {store.location} was started from Python with a job without a name. Expected a job function. "
            f"Run that program again with RunConfig(name=...) to go on."
        )
    if not only_reads:
        open_for_writing(url, single_writer=single_writer)
    arguments = _arguments(record, store)
    reference = JobReference(function=record.job_function, arguments=arguments, folder=job_folder)
    job = reference.resolve()
    wanted = {**arguments, **(settings or {})}
    if changed := changes(arguments, wanted):
        reference = replace(reference, arguments=wanted)
        before, job = job, reference.resolve()
        check_change(before, job, changed)
    train_index, eval_index = _indexes(job)
    found = _record(job, reference, train_index)
    found = replace(found, warm_start=record.warm_start, job_arguments=record.job_arguments)
    # Another job is named as such before its data is compared.
    check_same(record, found, store.location, free=frozenset({"input_fingerprint", "num_samples"}))
    run = OpenRun(
        url=store.location,
        store=store,
        record=record,
        job=job,
        reference=reference,
        train_index=train_index,
        eval_index=eval_index,
        take_over=take_over,
        allow_ancestor=allow_ancestor,
        settings_before=arguments if changed else None,
    )
    _compare_input(run, found, accept=accept_input_change)
    return run


def _compare_input(run: OpenRun, now: RunRecord, *, accept: bool) -> None:
    """Compares the files with those that the run knows; fills `run.input_changes` with what was accepted.

    Raises:
      InputChanged: they differ, or the newest record is damaged, and that was not accepted, or cannot be.
      RunMismatch: the run has no record of its files, and they have another number of rows.
    """
    known = read_input(run.store)
    for damage in known.damaged:
        run.notice(f"a record of the run's data files is damaged and ignored: {damage.name} ({damage.found})")
    changed = differences(known, run.train_index, run.eval_index)
    if known.is_newest_damaged:
        changed = [f"nobody knows, since {known.damaged[-1].name}, the record of the files accepted last, is damaged"]
    elif changed is None and run.record.input_fingerprint != now.input_fingerprint:
        changed = ["names, sizes, times or row counts differ"]
    if changed and not accept:
        raise input_changed(run.store, changed)
    if changed:
        newest = newest_commit(run)
        check_order(known, run.train_index, run.eval_index, run.input_plan, step=newest.step if newest else 0)
        run.input_changes = changed
    check_same(run.record, now, run.url, free=frozenset({"input_fingerprint"}))


def _arguments(record: RunRecord, store: Store) -> dict[str, Any]:
    """The job's arguments as they are now. A record's seal says nothing of the text inside."""
    settings = newest_settings(store)
    if settings is not None:
        return settings.arguments
    arguments = parse_strictly(RUN_FILE, record.job_arguments.encode())
    if not isinstance(arguments, dict):
        raise DocumentRefused(RUN_FILE, f"a {type(arguments).__name__} as arguments of the job", "an object")
    return arguments


def newest_commit(run: OpenRun) -> Manifest | None:
    """The commit that the run will be resumed from, or None before the first one.

    Raises:
      NameNotFound, DocumentRefused: the head is missing or damaged, and ancestors are not allowed.
    """
    lineage = read_lineage(run.store, rebuild=run.allow_ancestor)
    for name in lineage:
        try:
            return checkpoint.load(run.store, name)
        except (NameNotFound, DocumentRefused):
            if not run.allow_ancestor or name == lineage[-1]:
                raise
    return None


def _indexes(job: JobConfig) -> tuple[InputIndex, InputIndex | None]:
    data = job.resolved_data
    train, evaluation = build_index(data), build_index(data.for_evaluation()) if data.eval_paths else None
    if evaluation is not None:
        check_alike((*train.files, *evaluation.files))
    return train, evaluation


def _record(job: JobConfig, reference: JobReference | None, train_index: InputIndex) -> RunRecord:
    specs = table_specs(job, choose_buckets(job))
    return RunRecord(
        run_id=uuid.uuid4().hex,
        created_unix_s=SYSTEM_CLOCK.wall_s(),
        seed=job.seed,
        num_lanes=job.num_lanes,
        batch_size=job.batch_size,
        tables=tuple(
            TableRecord(
                name=spec.name,
                num_rows=spec.num_rows,
                dim=spec.dim,
                num_buckets=spec.layout.num_buckets,
                slots={name: width for name, width in spec.widths.items() if name != "rows"},
            )
            for spec in specs
        ),
        job_function=reference.function if reference else "",
        job_arguments=json.dumps(dict(reference.arguments) if reference else {}, sort_keys=True),
        num_samples=train_index.num_rows,
        input_fingerprint=hashlib.sha256(train_index.to_json().encode()).hexdigest(),
        staleness=job.staleness,
        wire_dtype=job.wire_dtype,
        overlap=job.overlap,
        order=job.data.order,
    )


@functools.cache
def _versions() -> Mapping[str, str]:
    return {name: metadata.version(name) for name in ("podembed", "jax", "optax", "numpy", "numba", "ray")}
