"""`RUN.json`: what a run is, written once when it is created and never changed.

Everything that the content of a step depends on is here: the seed, the order of samples, the batch, the lanes, how each
table is cut into buckets, and the input. A later start that differs in any of it would train something else under the
same name, so it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.errors import EXIT_CONFIGURATION
from podembed.orchestrator.commit.manifest import FORMAT_VERSION
from podembed.workers.input.lanes import LanePlan
from podembed.workers.storage.errors import NameNotFound
from podembed.workers.storage.records import encode, from_document, read_document
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, unseal

RUN_FILE = "RUN.json"
SHUFFLED = "shuffled"
_MAX_RUN_BYTES = 4 << 20
# What may differ between starts: who and when, and what changes no number.
_FREE_FIELDS = frozenset({"run_id", "created_unix_s", "overlap"})

# Runs of earlier versions recorded the jobs that come with the program without it.
_PACKAGE = "podembed."


class RunMismatch(RuntimeError):
    """The folder holds a run with other data, tables or settings."""

    exit_code = EXIT_CONFIGURATION

    def __init__(self, differences: Mapping[str, tuple[Any, Any]], location: str):
        shown = "; ".join(
            f"{key} is {_short(found)}, given {_short(given)}" for key, (found, given) in differences.items()
        )
        super().__init__(
            f"The run in {location} was created differently: {shown}. The same settings are expected, since steps "
            "already done depend on "
            "them. Use them, or another name for a new run."
        )
        self.differences = dict(differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecord:
    """How a table is cut. `slots` maps each slot's name to its width."""

    name: str
    num_rows: int
    dim: int
    num_buckets: int
    slots: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartRecord:
    """The commit of another run that this run began from.

    Attributes:
      location: folder or URL of that run.
      run_id, commit: which run and which of its commits.
      rules: in the order given; see `orchestrator.run.warm_start`.
    """

    location: str
    run_id: str
    commit: str
    rules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The identity of a run.

    Attributes:
      run_id: random; also in every manifest.
      created_unix_s: wall clock, for people.
      num_lanes: fixed parts of an epoch; hosts own lanes.
      job_function: `package.module:function` that returned the job; empty if the job was given as a value.
      job_arguments: its arguments as JSON text.
      num_samples: rows of the training data.
      input_fingerprint: hash of names, sizes, times and row counts of the input.
      staleness: steps between a lookup and the newest applied update.
      wire_dtype: how numbers of vectors and gradients travel between machines.
      overlap: whether rows that a step does not touch are sent ahead of its update. Changes no number, so it may differ
        between starts.
      warm_start: what the run began from; None for initial values.
      order: of the samples, `InputData.order`; records of older versions do not have it, and their samples are
        shuffled.
    """

    run_id: str
    format_version: int = FORMAT_VERSION
    created_unix_s: float
    seed: int
    num_lanes: int
    batch_size: int
    tables: tuple[TableRecord, ...]
    job_function: str
    job_arguments: str
    num_samples: int
    input_fingerprint: str
    staleness: int
    wire_dtype: str
    overlap: bool
    warm_start: WarmStartRecord | None = None
    order: str = SHUFFLED

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a pass over the training data; how its rows are grouped makes no difference."""
        plan = LanePlan(
            row_group_rows=(self.num_samples,),
            num_lanes=self.num_lanes,
            batch_size=self.batch_size,
            is_striped=self.order != SHUFFLED,
        )
        return plan.steps_per_epoch


def open_or_create(store: Store, record: RunRecord) -> RunRecord:
    """Creates the run, or opens it if it exists and is the same.

    Returns:
      The record on storage, whose `run_id` is the run's.

    Raises:
      RunMismatch: the run exists and differs in what its steps depend on.
      DocumentRefused: the record on storage is damaged or of another format.
    """
    if store.create_exclusive(RUN_FILE, encode(record)):
        return record
    found = read_run(store)
    check_same(found, record, store.location)
    return found


def check_same(found: RunRecord, given: RunRecord, location: str, *, free: frozenset[str] = frozenset()) -> None:
    """Compares what the content of steps depends on.

    Args:
      free: further fields that may differ.

    Raises:
      RunMismatch: with every field that differs.
    """
    if found.job_function.removeprefix(_PACKAGE) == given.job_function.removeprefix(_PACKAGE):
        free |= {"job_function"}
    differences = {
        field.name: (getattr(found, field.name), getattr(given, field.name))
        for field in dataclasses.fields(RunRecord)
        if field.name not in _FREE_FIELDS | free and getattr(found, field.name) != getattr(given, field.name)
    }
    if differences:
        raise RunMismatch(differences, location)


def read_run(store: Store) -> RunRecord:
    """The record of an existing run.

    Raises:
      NameNotFound: there is no run here; DocumentRefused: damaged, or of another format version.
    """
    data = read_document(store, RUN_FILE, max_bytes=_MAX_RUN_BYTES)
    record = from_document(RunRecord, RUN_FILE, {"order": SHUFFLED, **unseal(RUN_FILE, data, max_bytes=_MAX_RUN_BYTES)})
    if record.format_version != FORMAT_VERSION:
        found = f"format version {record.format_version}"
        raise DocumentRefused(
            RUN_FILE, found, f"{FORMAT_VERSION}, which this program reads; use a matching version of podembed"
        )
    return record


def find_run(store: Store) -> RunRecord | None:
    """The record, or None if no run was created here."""
    try:
        return read_run(store)
    except NameNotFound:
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
