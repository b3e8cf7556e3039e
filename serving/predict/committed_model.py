"""`CommittedModel`: a job with one of its commits, and the rows of the commit as they are needed.

Whole buckets are read and verified. They stay in memory up to a limit; beyond it, those that were not needed for the
longest time go. So the memory is bounded whatever the tables' size. Small tables are read once.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from podembed.embedding.initializers import row_source
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import commit_file, parse_commit_name
from podembed.orchestrator.commit.run_record import read_run
from podembed.orchestrator.commit.verification import require_metadata
from podembed.orchestrator.run.input_record import read_input
from podembed.orchestrator.run.job_settings import arguments_of
from podembed.orchestrator.run.meaning import changes_of_scoring, meaning_of
from podembed.orchestrator.run.reference import CommittedState, open_commit, open_run_store, split_reference
from podembed.serving.committed_rows import HeldKeys
from podembed.serving.row_form import RowForm
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.checkpoint.files import read_bucket_array
from podembed.workers.device.gang_errors import GangError, looking_for
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import table_specs
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store

KEPT_BYTES = 4 << 30
_MOST_ATTEMPTS = 3
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommittedModel:
    """A job and the commit that is read.

    Attributes:
      tables: files of each table, in the job's order.
      specs: the same as the hosts saw them.
    """

    job: JobConfig
    state: CommittedState
    tables: tuple[TableFiles, ...]
    specs: tuple[TableSpec, ...]

    def dense(self, parts: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The dense arrays of some parts of the state, by their keys.

        Raises:
          ChunkDamaged: one is missing or differs from the manifest.
        """
        files = [file for file in self.state.manifest.dense if file.key.split("/", 1)[0] in parts]
        return {file.key: read_dense(self.state.store, file) for file in files}


def open_model(
    run: str | os.PathLike[str], *, commit: str | None = None, job: JobConfig | None = None, folder: str = ""
) -> CommittedModel:
    """Reads the manifest of a commit, and finds the job of its run.

    Args:
      run: `RUN`, for its newest commit, or `RUN@COMMIT`.
      commit: name of the commit, or its step, if it is given apart from the run.
      job: job of a run that was started with a job as a value; None asks the run's record.
      folder: where the job's module may lie if it is not installed.

    Raises:
      ConfigurationError: no run, no commit, no job, tables that are not those of the job, or rows that mean something
        else in it.
      DocumentRefused: the manifest is damaged.
    """
    url, named = split_reference(run)
    if commit is not None and commit.isdigit():
        commit = _commit_of_step(open_run_store(url), int(commit))
    state = open_commit(f"{url}@{named}" if named else url, commit=commit)
    is_given = job is not None
    job = job or _job_of(state.store, folder)
    found = {table.name: (table.num_rows, table.dim) for table in state.manifest.tables}
    cut = {table.name: table.num_buckets for table in state.manifest.tables}
    specs = table_specs(job, [cut.get(name) for name in job.table_names])
    # A capacity may have been raised since that commit.
    grows = {table.name for table in state.manifest.tables if table.is_dynamic}
    grows &= {spec.name for spec in specs if spec.keys.columns and spec.num_rows > found.get(spec.name, (0, 0))[0]}
    expected = {spec.name: (found[spec.name][0] if spec.name in grows else spec.num_rows, spec.dim) for spec in specs}
    if found != expected:
        different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))[0]
        raise ConfigurationError(
            f"Found table '{different}' as {_shape(found.get(different))} in {state.location}. Expected "
            f"{_shape(expected.get(different))}, as the job declares it. The job's function has changed since: restore "
            "it."
        )
    _check_meaning(state, job, is_given=is_given)
    files = tuple(state.table(name) for name in job.table_names)
    return CommittedModel(job=job, state=state, tables=files, specs=specs)


def with_commit(
    run: str | os.PathLike[str],
    read: Callable[[CommittedModel], Result],
    *,
    commit: str | None = None,
    job: JobConfig | None = None,
    folder: str = "",
) -> Result:
    """Reads a commit of a run that may be in training, which may delete the commit meanwhile.

    Without a name, it then begins again with the newest commit. Arguments are as for `open_model`.

    Raises:
      ConfigurationError: JAX has none of the devices that JAX_PLATFORMS names.
      As `open_model` and `read`.
    """
    _require_devices()
    left = _MOST_ATTEMPTS
    while True:
        left -= 1
        model = open_model(run, commit=commit, job=job, folder=folder)
        try:
            return read(model)
        except (ChunkDamaged, NameNotFound) as error:
            if model.state.store.exists(commit_file(model.state.manifest.name)):
                raise
            is_named = commit is not None or split_reference(run)[1] is not None
            if is_named or not left:
                raise ConfigurationError(
                    f"Found commit {model.state.manifest.name} of {model.state.store.location} deleted while it was "
                    "read. Expected one that stays. The run keeps its newest commits alone: name a newer one, or keep "
                    "more (--keep)."
                ) from error


def _check_meaning(state: CommittedState, job: JobConfig, *, is_given: bool) -> None:
    """Refuses a job that would take rows of the commit for those of other values. Older runs do not say what they mean.

    Args:
      is_given: by the caller, whose data may have other names.

    Raises:
      ConfigurationError: with each difference.
    """
    known = read_input(state.store).at(state.manifest.step)
    if known is None or known.meaning is None:
        return
    found = changes_of_scoring(known.meaning, meaning_of(job), free={"column"} if is_given else ())
    if found:
        told = "\n".join(f"  - {phrase}" for phrase in found)
        raise ConfigurationError(
            f"Found a job that makes something else of its columns and rows than commit {state.manifest.name} of "
            f"{state.store.location} was trained with:\n{told}\nExpected the same. "
            f"{'Pass the job of that run.' if is_given else 'The job has changed since: restore it.'}"
        )


def _require_devices() -> None:
    import jax

    try:
        with looking_for(""):
            jax.local_devices()
    except GangError as error:
        raise ConfigurationError(str(error)) from error


def _shape(table: tuple[int, int] | None) -> str:
    return "not there" if table is None else f"{table[0]:,} rows of {table[1]}"


def _commit_of_step(store: Store, step: int) -> str:
    lineage = read_lineage(store)
    steps = {(parse_commit_name(name) or (-1, 0))[0]: name for name in lineage}
    if step not in steps:
        there = ", ".join(str(one) for one in sorted(steps, reverse=True)[:8]) or "none (there is no commit yet)"
        raise ConfigurationError(
            f"Found no commit of step {step} in {store.location}. Expected one of the steps {there}. `podembed inspect "
            f"{store.location}` lists all commits."
        )
    return steps[step]


def _job_of(store: Store, folder: str) -> JobConfig:
    """Raises `ConfigurationError` where the run does not know its job by name."""
    record = read_run(store)
    if not record.job_function:
        raise ConfigurationError(
            f"The run in {store.location} was started from Python with a job without a name. Expected a job function. "
            "In Python, pass the job: podembed.evaluate(run, job=job)."
        )
    arguments: Mapping[str, object] = arguments_of(record, store)
    return JobReference(function=record.job_function, arguments=arguments, folder=folder).resolve()


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Rows of a bucket, and whose they are where keys come and go."""

    rows: np.ndarray
    keys: HeldKeys | None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.keys is None else self.keys.nbytes)


class CommittedRows:
    """Rows of a commit, read by need. Mutated: the buckets that are kept.

    Args:
      kept_bytes: bytes of buckets in memory.
      form: form in which a copy has the rows. They are what servers of the copy make of them.
    """

    def __init__(self, model: CommittedModel, *, kept_bytes: int = KEPT_BYTES, form: RowForm | None = None) -> None:
        self._store, self._tables, self._kept_bytes = model.state.store, model.tables, kept_bytes
        self._form = form or RowForm()
        self._specs = model.specs
        self._kept: OrderedDict[tuple[int, int], _Bucket] = OrderedDict()
        self._size_bytes = 0
        self._checked: set[int] = set()
        self.num_reads = 0

    def rows(self, table: int, ids: np.ndarray) -> np.ndarray:
        """As `serving.predict.pooled_rows.RowSource` says.

        Raises:
          ChunkDamaged: a bucket is not what was committed.
        """
        files = self._tables[table]
        if table not in self._checked:
            require_metadata(self._store, files)
            self._checked.add(table)
        found = np.empty((len(ids), files.dim), np.float32)
        spec = self._specs[table]
        buckets = files.layout.buckets_of(spec.keys.hashes_of(ids))
        order = np.argsort(buckets, kind="stable")
        starts = np.flatnonzero(np.diff(buckets[order], prepend=-1))
        has_row = np.ones(len(ids), bool)
        for at in np.split(order, starts[1:]) if len(ids) else ():
            held = self._bucket(table, int(buckets[at[0]]))
            if held.keys is None:
                positions = files.layout.positions_of(ids[at])
            else:
                positions = held.keys.positions(ids[at])
                has_row[at] = positions >= 0
            # The shared row of keys without one is the first.
            found[at] = held.rows[np.maximum(positions, 0)]
        default = spec.keys.default if isinstance(spec.keys, DynamicKeys) else None
        if default == "zeros":
            found[~has_row] = 0
        elif default == "first" and not has_row.all():
            found[~has_row] = _first_values(spec, ids[~has_row])
        return found

    def keys(self, table: int) -> np.ndarray:
        """All keys that have a row, int64, rising; of a table whose keys come and go."""
        files, least = self._tables[table], self._form.min_count
        found = [HeldKeys.of(self._store, files, at, min_count=least) for at in range(files.num_buckets)]
        return np.sort(np.concatenate([one.keys for one in found]))

    def _bucket(self, table: int, bucket: int) -> _Bucket:
        key = (table, bucket)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        files = self._tables[table]
        rows = self._form.served(read_bucket_array(self._store, files, files.arrays[0], bucket))
        keys = HeldKeys.of(self._store, files, bucket, min_count=self._form.min_count) if files.is_dynamic else None
        found = _Bucket(rows, keys)
        self.num_reads += 1
        self._kept[key] = found
        self._size_bytes += found.nbytes
        while self._size_bytes > self._kept_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._size_bytes -= oldest.nbytes
        return found


def _first_values(spec: TableSpec, keys: np.ndarray) -> np.ndarray:
    values = np.empty((len(keys), spec.dim), np.float32)
    seed, name = spec.seed, spec.name
    row_source(spec.initializer, seed=seed, table_name=name, num_rows=spec.num_rows, dim=spec.dim)(keys, values)
    return values
