"""`settings/g<generation>.json`: arguments of a run's job that a user changed on the way, and which of them may change
at all.

`RUN.json` is never changed, so what differs from it is recorded beside it. The driver that holds the lease does that
before its first step with the new values. The newest record counts; it has all arguments, so no other need be read.
What may change is what leaves the meaning of steps that are done, and every shape, as it was.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.run_record import RUN_FILE, RunRecord, find_run
from podembed.workers.checkpoint.checkpoint_files import ROWS
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import choose_buckets, table_specs
from podembed.workers.storage.records import decode, encode, read_document
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, parse_strictly

FOLDER = "settings"
_FILE = re.compile(r"g(\d{8,12})\.json")
_MAX_BYTES = 4 << 20
_REMEDY = (
    "The file is damaged: restore it from a copy, or delete it. The arguments before it count then, "
    "and podembed resume --set changes them again."
)
# Fields of a job that steps already done depend on, and why.
_FIXED = {
    "batch_size": "a step is that many samples",
    "num_lanes": "a step takes its samples from these parts of an epoch",
    "seed": "the order of samples follows from it",
    "staleness": "it decides which updates a lookup sees",
    "wire_dtype": "it decides how numbers are rounded",
}
# Of the data: which files, which is compared with those that the run knows, and what is tolerated in them.
_FREE_OF_DATA = {"paths", "eval_paths", "max_bad_rows"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """One argument of the job's function. `before` and `after` are JSON; `before` is empty where it was left to its
    default.
    """

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRecord:
    """Arguments from a step on.

    Attributes:
      generation: generation of the driver that began with them.
      step: its first step.
      changed_unix_s: wall clock, for people.
      changes: since the arguments before.
      job_arguments: all of them, as JSON text.
    """

    generation: int
    step: int
    changed_unix_s: float
    changes: tuple[SettingChange, ...]
    job_arguments: str

    def describe(self) -> str:
        """Such as `learning_rate 0.05 -> 0.02`."""
        return ", ".join(f"{change.name} {change.before or 'its default'} -> {change.after}" for change in self.changes)

    @property
    def arguments(self) -> dict[str, Any]:
        """Raises:
        DocumentRefused: the text inside is no JSON object; the record's seal says nothing of it.
        """
        name = f"{FOLDER}/g{self.generation:08d}.json"
        arguments = parse_strictly(name, self.job_arguments.encode())
        if not isinstance(arguments, dict):
            raise DocumentRefused(name, f"a {type(arguments).__name__} as arguments of the job", "an object")
        return arguments


def read_settings(store: Store) -> tuple[SettingsRecord, ...]:
    """All changes of a run, oldest first.

    Raises:
      DocumentRefused: a record is damaged, or its arguments are.
    """
    return tuple(_read(store, file) for file in _files(store))


def newest_settings(store: Store) -> SettingsRecord | None:
    """The record that counts; None where nothing was changed. Older ones are not read, so their damage stops no driver.

    Raises:
      DocumentRefused: it is damaged, or its arguments are.
    """
    files = _files(store)
    try:
        return _read(store, files[-1]) if files else None
    except DocumentRefused as error:
        raise DocumentRefused(error.name, error.found, error.expected, _REMEDY) from error


def _files(store: Store) -> list[str]:
    names = sorted((name for name in store.children(FOLDER) if _FILE.fullmatch(name)), key=lambda name: int(name[1:-5]))
    return [f"{FOLDER}/{name}" for name in names]


def _read(store: Store, file: str) -> SettingsRecord:
    record = decode(SettingsRecord, file, read_document(store, file, max_bytes=_MAX_BYTES), max_bytes=_MAX_BYTES)
    _ = record.arguments  # What the seal does not cover is looked at as well.
    return record


def record_settings(
    store: Store, before: Mapping[str, Any], after: Mapping[str, Any], *, generation: int, step: int
) -> SettingsRecord:
    """Writes that these are the arguments from a step on. For the holder of the lease."""
    record = SettingsRecord(
        generation=generation,
        step=step,
        changed_unix_s=time.time(),
        changes=tuple(changes(before, after)),
        job_arguments=json.dumps(dict(after), sort_keys=True),
    )
    store.create_exclusive(f"{FOLDER}/g{generation:08d}.json", encode(record))
    return record


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[SettingChange]:
    """The arguments that differ. Equal values are no change, also if they are given."""
    return [
        SettingChange(name=name, before=json.dumps(before[name]) if name in before else "", after=json.dumps(value))
        for name, value in sorted(after.items())
        if name not in before or before[name] != value or type(before[name]) is not type(value)
    ]


def check_change(before: JobConfig, after: JobConfig, changed: Sequence[SettingChange]) -> None:
    """Refuses arguments with which the steps that are done, or the shapes of the state, would mean something else.

    Args:
      before, after: the job as it was, and with the new arguments.

    Raises:
      ConfigurationError: with everything that would change, and why it may not.
    """
    found = [
        f"{name} {getattr(before, name)} would be {getattr(after, name)}, but {why}"
        for name, why in _FIXED.items()
        if getattr(before, name) != getattr(after, name)
    ]
    found += [*_data_differences(before, after), *_table_differences(before, after)]
    if not found:
        found = _dense_differences(before, after)
    if found:
        named = " ".join(f"{change.name}={change.after}" for change in changed)
        told = "\n".join(f"  - {difference}" for difference in found)
        raise ConfigurationError(
            f"Found --set {named}, which changes what a run may not change:\n{told}\nExpected learning rates, epochs "
            "and the like. Leave it out, "
            f"or begin a new run with the tables of this one (podembed train --warm-start)."
        )


def _data_differences(before: JobConfig, after: JobConfig) -> list[str]:
    if type(before.data) is not type(after.data):
        return [
            f"the data is {type(before.data).__name__} and would be {type(after.data).__name__}, but a step counts its "
            "rows"
        ]
    if before.data.order != after.data.order:
        return [f"the data's order {before.data.order} would be {after.data.order}, but a step is a position in it"]
    names = [field.name for field in dataclasses.fields(before.data) if field.name not in _FREE_OF_DATA]
    return [
        f"the data's {name} would be another one, but equal values must stay equal rows of the tables"
        for name in names
        if getattr(before.data, name) != getattr(after.data, name)
    ]


def _table_differences(before: JobConfig, after: JobConfig) -> list[str]:
    used = [{name: _table_name(job, name) for name in job.features} for job in (before, after)]
    if used[0] != used[1] or [*used[0]] != [*used[1]]:
        return ["features would look up in other tables, but the model was trained on theirs"]
    found = []
    for was, now in zip(*(table_specs(job, choose_buckets(job)) for job in (before, after)), strict=True):
        pairs = {"rows": (was.num_rows, now.num_rows), "dimension": (was.dim, now.dim)}
        if isinstance(was.keys, DynamicKeys) and isinstance(now.keys, DynamicKeys):
            least, capacity = was.keys.capacity, now.keys.capacity
            # More room is found behind what is committed.
            pairs["rows"] = (least, capacity) if capacity < least else (0, 0)
        if was.dim == now.dim:  # else their widths follow
            pairs["slots"] = (_slots(was.widths), _slots(now.widths))
        found += [
            f"table '{was.name}' would have other {what} ({old} -> {new}), but its rows are committed"
            for what, (old, new) in pairs.items()
            if old != new
        ]
    combiners = [{name: job.features[name].table.combiner for name in job.features} for job in (before, after)]
    if combiners[0] != combiners[1]:
        found.append("tables would have another combiner, but the model was trained on pooled vectors of this one")
    if before.activation_shapes != after.activation_shapes:
        found.append("activations would have another shape, but the model was trained on theirs")
    rounding = [[table.quantization_config for table in job.tables] for job in (before, after)]
    if rounding[0] != rounding[1]:
        found.append("tables would have another quantization_config, but the model was trained on vectors rounded so")
    return found


def _slots(widths: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {width}" for name, width in widths.items() if name != ROWS) or "none"


def _table_name(job: JobConfig, feature: str) -> str:
    at = next(at for at, table in enumerate(job.tables) if table is job.features[feature].table)
    return job.table_names[at]


def _dense_differences(before: JobConfig, after: JobConfig) -> list[str]:
    """Shapes of parameters and of the dense optimizer's state; nothing is computed."""
    import jax
    import optax

    from podembed.workers.device.dense_half import initial

    def shapes(job: JobConfig) -> tuple[Any, Any]:
        optimizer = job.dense_optimizer or optax.adam(1e-3)
        params, kept = jax.eval_shape(lambda: initial(job, jax.random.key(job.seed)))
        state = jax.eval_shape(optimizer.init, params)
        return _leaves((params, kept)), _leaves(state)

    def _leaves(tree: Any) -> list[tuple[str, tuple[int, ...], str]]:
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        return [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in found]

    params, state = zip(shapes(before), shapes(after), strict=True)
    if params[0] != params[1]:
        return ["the model's parameters would have other names or shapes, but these are committed"]
    if state[0] != state[1]:
        return [
            "the dense optimizer would keep another state, but this one is committed (begin its schedule when the run "
            "begins)"
        ]
    return []


def arguments_of(record: RunRecord, store: Store) -> dict[str, Any]:
    """The job's arguments as they are now. A record's seal says nothing of the text inside."""
    settings = newest_settings(store)
    if settings is not None:
        return settings.arguments
    arguments = parse_strictly(RUN_FILE, record.job_arguments.encode())
    if not isinstance(arguments, dict):
        raise DocumentRefused(RUN_FILE, f"a {type(arguments).__name__} as arguments of the job", "an object")
    return arguments


def with_changed_settings(
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
