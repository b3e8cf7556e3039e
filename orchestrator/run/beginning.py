"""The commit that a new run begins from. It is found and checked when the run is created, and recorded in `RUN.json`.
Every generation opens it again until the run has a commit of its own.

A run that is lost before its first commit therefore begins from the same state again. Which table comes from where is
`orchestrator.run.warm_start`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.api.config import ConfigurationError, WarmStart
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.commit.run_record import RunRecord, WarmStartRecord, read_run
from podembed.orchestrator.commit.verification import size_damages
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.run import MeaningUnknown
from podembed.orchestrator.run.input_record import read_input
from podembed.orchestrator.run.meaning import MeaningRecord, meaning_of
from podembed.orchestrator.run.reference import CommittedState, open_commit, split_reference
from podembed.orchestrator.run.warm_start import (
    WarmStartPlan,
    parse_accepted,
    parse_dense_rule,
    parse_rules,
    plan_warm_start,
    refuse_hashed_growth,
)
from podembed.workers.input.index import InputIndex
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import choose_buckets, table_specs
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What the workers of a run without a commit start from: files below `location`, as the plan says."""

    location: str
    plan: WarmStartPlan


def record_of(
    warm_start: WarmStart,
    job: JobConfig,
    existing: RunRecord | None,
    *,
    index: InputIndex | None = None,
    emit: Emit | None = None,
) -> WarmStartRecord:
    """The record of a new run's beginning.

    Args:
      job: job of the run.
      existing: the record of a run that is there already. "The newest commit" was decided when it was created.
      index: of its training files, which say what kinds of values the columns hold.
      emit: callback that is told where the other run does not say what its rows mean.

    Raises:
      ConfigurationError: there is no such run or commit, or some of its files are missing.
      WarmStartRefused: its tables are not those of the job, or their rows mean something else, and no rule says that
        this is meant.
    """
    refuse_hashed_growth(job, parse_rules(warm_start.rules))
    specs = table_specs(job, choose_buckets(job))
    url, commit = split_reference(warm_start.source)
    location = Store(url).location
    known = existing.warm_start if existing else None
    if known is not None and commit is None and (known.location, known.rules) == (location, warm_start.rules):
        return known
    state = open_commit(warm_start.source)
    _plan(state.manifest, specs, warm_start.rules, _meanings(state, job, index, emit))
    _check_files(state)
    return WarmStartRecord(
        location=location, run_id=state.manifest.run_id, commit=state.manifest.name, rules=warm_start.rules
    )


def open_beginning(record: WarmStartRecord, job: JobConfig, table_buckets: Sequence[int]) -> Beginning:
    """The files to start from, and what comes from which.

    Raises:
      ConfigurationError: the commit is gone, or another run lies there now.
      WarmStartRefused: the tables of the job have changed since.
    """
    state = open_commit(record.location, commit=record.commit)
    if state.manifest.run_id != record.run_id:
        raise ConfigurationError(
            f"Found run {state.manifest.run_id[:60]} in {record.location}. Expected {record.run_id[:60]}, from whose "
            f"commit {record.commit} this run began. Restore that run, or begin a new one."
        )
    _check_files(state)
    return Beginning(
        location=record.location, plan=_plan(state.manifest, table_specs(job, table_buckets), record.rules)
    )


def _plan(
    manifest: Manifest,
    specs: Sequence[TableSpec],
    rules: Sequence[str],
    meanings: tuple[MeaningRecord, MeaningRecord] | None = None,
) -> WarmStartPlan:
    tables, dense, accepted = parse_rules(rules), parse_dense_rule(rules), parse_accepted(rules)
    return plan_warm_start(manifest, specs, tables, dense=dense, meanings=meanings, accepted=accepted)


def _meanings(
    state: CommittedState, job: JobConfig, index: InputIndex | None, emit: Emit | None
) -> tuple[MeaningRecord, MeaningRecord] | None:
    """The meanings of rows in the commit and in the job; None where the former is not recorded."""
    known = read_input(state.store).at(state.manifest.step)
    if known is not None and known.meaning is not None:
        return known.meaning, meaning_of(job, index)
    if emit is not None and not read_run(state.store).is_imported:
        emit(MeaningUnknown(location=state.store.location))
    return None


def _check_files(state: CommittedState) -> None:
    damage = next(size_damages(state.store, state.manifest), None)
    if damage is not None:
        raise ConfigurationError(
            f"Found {damage.found} in {damage.name} of {state.location}. Expected {damage.expected}. "
            f"Choose another commit; `podembed fsck {state.store.location}` names all damage."
        )
