"""`OpenRun`: a run's folder, its record, its job and its data, opened and checked (`opening`).

The folder is the only truth about a run. What is here stands between the driver's loop and the files. Who may write is
in `claims`, and what a commit says is put together in `manifest_of_save`.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from podembed.orchestrator.api.keep_policies import CommitMetrics
from podembed.orchestrator.commit.keep import read_committed
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.lease_files import read_claims, read_lineage
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.commit.run_record import RunRecord
from podembed.orchestrator.run.beginning import Beginning, open_beginning
from podembed.orchestrator.run.meaning import MeaningRecord, meaning_of
from podembed.orchestrator.run.reference import newest_commit
from podembed.workers.input.index import InputIndex
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.sources import job_plan
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store


def _submission() -> str:
    return os.environ.get("RAY_JOB_SUBMISSION_ID") or uuid.uuid4().hex[:12]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenRun:
    """One run, checked. A value.

    Attributes:
      url: the folder, absolute.
      record: what the run is.
      job: resolved.
      reference: how workers get the job, if it has a name; otherwise it is sent as a value.
      take_over: fence another driver that still holds the run.
      allow_ancestor: if the newest commit is damaged, go back to the newest one that is not.
      input_changes: how the data files differ from those that the run knows; accepted, and to be recorded.
      settings_before: the job's arguments before those that were changed for this call, which are to be recorded; None
        if they stay.
      submission: shared by the drivers of one submitted job, which do not wait for each other.
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
    input_changes: tuple[str, ...] = ()
    settings_before: Mapping[str, Any] | None = None
    submission: str = field(default_factory=_submission)

    @property
    def job_for_workers(self) -> JobConfig | JobReference:
        # Callbacks are for the driver, and may hold what cannot be sent.
        return self.reference or (replace(self.job, callbacks=()) if self.job.callbacks else self.job)

    @property
    def table_buckets(self) -> tuple[int, ...]:
        """The number of buckets of each table, in the job's order."""
        buckets = {table.name: table.num_buckets for table in self.record.tables}
        return tuple(buckets[name] for name in self.job.table_names)

    @property
    def meaning(self) -> MeaningRecord:
        """The record of how the job's values become rows."""
        return meaning_of(self.job, self.train_index)

    @property
    def has_begun(self) -> bool:
        """Whether a driver has ever claimed it."""
        return bool(read_claims(self.store))

    @property
    def input_plan(self) -> LanePlan:
        return job_plan(self.job, self.train_index)

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return self.input_plan.steps_per_epoch * self.job.num_epochs

    def newest_commit(self) -> Manifest | None:
        """The commit that the run will be resumed from, or None before the first one.

        Raises:
          NameNotFound, DocumentRefused: the head is missing or damaged, and ancestors are not allowed.
        """
        return newest_commit(self.store, allow_ancestor=self.allow_ancestor)

    def committed(self, lease: Lease) -> list[CommitMetrics]:
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
        """The state that a generation without a commit starts from; None for initial values.

        Raises:
          ConfigurationError: the commit that this run began from is gone.
        """
        record = self.record.warm_start
        return open_beginning(record, self.job, self.table_buckets) if record else None
