"""`RUN.json`: what a run is, written once when it is created and never changed.

Everything that decides the content of a step is here: seed, order of samples, batch, lanes, input, and how each table
is cut into buckets. A later start that differs in any of it would train something else under the same name, so it is
refused.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.run_errors import EXIT_CONFIGURATION
from podembed.orchestrator.commit.manifest import FORMAT_VERSION, require_version
from podembed.orchestrator.commit.published import refuse_copy
from podembed.workers.input.lanes import LanePlan
from podembed.workers.storage.records import encode, from_document, read_document
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, unseal

RUN_FILE = "RUN.json"
SHUFFLED = "shuffled"
_MAX_RUN_BYTES = 4 << 20
# What may differ between starts: who and when, and what changes no number.
_FREE_FIELDS = frozenset({"format_version", "run_id", "created_unix_s", "overlap"})
# What records of older versions do not have.
_FIRST_ACCUMULATOR = 0.1
_OF_OLDER_VERSIONS = {"order": SHUFFLED, "initial_accumulator_value": _FIRST_ACCUMULATOR}

# Runs of earlier versions recorded the jobs that come with the program without it.
_PACKAGE = "podembed."
_OF_KEYS = ("key", "last", "count")


class RunMismatch(RuntimeError):
    """The folder holds a run with other data, tables or settings."""

    exit_code = EXIT_CONFIGURATION

    def __init__(self, differences: Mapping[str, tuple[Any, Any]], location: str):
        told, rules = [], []
        for field, (found, given) in differences.items():
            if field == "tables":
                said = _table_differences(found, given)
                told += [f"{text} ({rule})" if rule else text for text, rule in said]
                rules += [rule for _, rule in said if rule]
            elif field == "job_arguments":
                told += _argument_differences(found, given)
            else:
                told.append(f"{field} is {_short(found)}, given {_short(given)}")
        command = " ".join(["podembed train --warm-start", shlex.quote(location)])
        if rules:
            command += " --warm-start-rules " + " ".join(rules)
        super().__init__(
            f"The run in {location} was created with other settings:\n"
            + "\n".join(f"  - {text}" for text in told)
            + "\nThe same settings are expected, since steps already done depend on them. Use them, or begin a new "
            f"run, with the tables of this one if you like: {command}"
        )
        self.differences = dict(differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecord:
    """The shape of a table and its number of buckets. `slots` maps each slot's name to its width."""

    name: str
    num_rows: int
    dim: int
    num_buckets: int
    slots: Mapping[str, int]

    @property
    def is_dynamic(self) -> bool:
        """Whether its keys come and go. Then what is known of them is among the slots."""
        return {*_OF_KEYS} <= self.slots.keys()

    @property
    def slots_in_words(self) -> str:
        """The names of the optimizer's slots, and whether keys come and go."""
        own = {*_OF_KEYS, *(f"waiting_{name}" for name in _OF_KEYS)} if self.is_dynamic else set[str]()
        names = ", ".join(name for name in self.slots if name not in own) or "no slots"
        return f"{names}; keys come and go" if self.is_dynamic else names


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
      warm_start: commit of another run that this one began from; None for initial values.
      order: order of the samples, `InputData.order`; records of older versions do not have it, and their samples are
        shuffled.
      initial_accumulator_value: first value of accumulators; records of older versions do not have it, and their tables
        began with TensorFlow's.
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
    initial_accumulator_value: float = _FIRST_ACCUMULATOR

    @property
    def is_imported(self) -> bool:
        """Whether the run holds tables from elsewhere, without a job and data. Others begin from it."""
        return not self.job_function and self.num_samples == 0

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
    try:
        data = read_document(store, RUN_FILE, max_bytes=_MAX_RUN_BYTES)
        document = unseal(RUN_FILE, data, max_bytes=_MAX_RUN_BYTES)
        record = from_document(RunRecord, RUN_FILE, {**_OF_OLDER_VERSIONS, **document})
    except DocumentRefused as error:
        run = shlex.quote(store.location)
        # An older commit has no other record, so what helps with damaged commits does not help here.
        raise DocumentRefused(
            error.name,
            error.found,
            error.expected,
            "Restore the file from a copy; it never changes, so any copy of this run will do. Without one, no driver "
            f"can go on with this run. podembed fsck {run} tells which of its commits are whole: train on in a new run "
            "that begins from one of them (podembed train, with the same job and data, another --name, and "
            f"--warm-start {run}), or read its tables (podembed export). The new run begins at step 0 of its data.",
        ) from error
    require_version(RUN_FILE, record.format_version)
    return record


def find_run(store: Store) -> RunRecord | None:
    """The record, or None if no run was created here.

    Raises:
      ConfigurationError: a copy for servers lies here.
    """
    try:
        return read_run(store)
    except NameNotFound:
        refuse_copy(store)
        return None


def _table_differences(found: Sequence[TableRecord], given: Sequence[TableRecord]) -> list[tuple[str, str]]:
    """The difference of each table, and the warm-start rule that declares it; empty where no rule is needed."""
    before, after = ({table.name: table for table in tables} for tables in (found, given))
    gone = [table for table in found if table.name not in after]
    new = [table for table in given if table.name not in before]
    renamed = {}
    for table in new:
        alike = [old for old in gone if dataclasses.replace(old, name=table.name) == table]
        if len(alike) == 1 and alike[0].name not in renamed.values():
            renamed[table.name] = alike[0].name
    said = [(f"table '{old}' is called '{name}' now", f"{name}=rename={old}") for name, old in renamed.items()]
    said += [
        (f"table '{table.name}' is not in the job", f"{table.name}=drop")
        for table in gone
        if table.name not in renamed.values()
    ]
    said += [(f"table '{table.name}' is new", f"{table.name}=reinit") for table in new if table.name not in renamed]
    for table in found:
        if table.name in after:
            said += _table_difference(table, after[table.name])
    if not said:
        said.append((f"the tables come as {', '.join(before)}, given as {', '.join(after)}", ""))
    return said


def _table_difference(found: TableRecord, given: TableRecord) -> list[tuple[str, str]]:
    """One table of the same name. Slots follow from the dimension and buckets from the rows: only causes count."""
    name = f"table '{found.name}'"
    anew, has_same_slots = f"{found.name}=reinit", found.slots == given.slots
    if found.is_dynamic or given.is_dynamic:
        # Keys that come and go, or came and went.
        if found == given:
            return []
        shapes = [f"{one.num_rows:,} rows of {_slots_of(one)}" for one in (found, given)]
        return [(f"{name} has {shapes[0]}, given {shapes[1]}: its keys keep their rows where these are the same", anew)]
    if found.dim != given.dim:
        return [(f"{name} has dimension {found.dim}, given {given.dim}", anew)]
    if found.num_rows != given.num_rows:
        can_grow = found.num_rows < given.num_rows and has_same_slots
        rows = (f"{name} has {found.num_rows:,} rows, given {given.num_rows:,}", anew)
        rows = (rows[0], f"{found.name}=grow") if can_grow else rows
        return [rows] if has_same_slots else [rows, (_slot_difference(found, given), "")]
    if not has_same_slots:
        return [(_slot_difference(found, given), f"{found.name}=rows")]
    if found.num_buckets != given.num_buckets:
        return [(f"{name} has {found.num_buckets} buckets, given {given.num_buckets}", "")]
    return []


def _slot_difference(found: TableRecord, given: TableRecord) -> str:
    return f"table '{found.name}' has the optimizer slots {_slots_of(found)}, given {_slots_of(given)}"


def _slots_of(table: TableRecord) -> str:
    return ", ".join(f"{name} ({width})" for name, width in table.slots.items()) or "none"


def _argument_differences(found: str, given: str) -> list[str]:
    """Arguments of the job's function that differ, of two JSON texts."""
    before, after = (_arguments(text) for text in (found, given))
    if before is None or after is None:
        return [f"job_arguments is {_short(found)}, given {_short(given)}"]
    return [
        f"job_arguments: {name} is {_argument(before, name)}, given {_argument(after, name)}"
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or before[name] != after[name]
    ] or ["job_arguments is written otherwise"]


def _arguments(text: str) -> dict[str, Any] | None:
    """None for a text that is no JSON object; the record's seal says nothing of it."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def _argument(arguments: Mapping[str, Any], name: str) -> str:
    return _short(arguments[name]) if name in arguments else "its default"


def _short(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, WarmStartRecord):
        value = "@".join([value.location, value.commit]) + "".join(f" {rule}" for rule in value.rules)
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
