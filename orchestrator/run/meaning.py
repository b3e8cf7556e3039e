"""What makes a row of a table mean what it means: how values become rows, and what slots and dense numbers stand for.

A commit holds numbers; which value a row belongs to is said by the job alone. So a run records with its data files
(`INPUT.json`) how each column becomes rows and numbers, and by which rule each table is updated. A job whose code was
edited, another run that begins from a commit, and whoever scores with one are compared with that. Learning rates are
not recorded: they may change. Nor is what a function computes, such as a model or an optimizer of optax.

Comparison is pure, but for a vocabulary that has grown: its first lines are read again.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podembed.embedding.config import TableConfig
from podembed.workers.columns.decode import kinds_of
from podembed.workers.columns.id_columns import NULLS
from podembed.workers.columns.vocabulary import load_vocabulary
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import InputData
from podembed.workers.formats.registry import declared_content
from podembed.workers.input.index import InputIndex
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import table_specs

# How a value becomes a row of the table.
ROW_SETTINGS = frozenset(
    {"mode", "holds", "missing", "salt", "num_reserved", "unit", "since", "boundaries", "crossed_with", "invalid_ids"}
)
# What else the activations depend on that a model was trained on.
ACTIVATION_SETTINGS = ROW_SETTINGS | {"column", "weights", "last", "combiner", "quantization", "default"}
_DENSE, _EXTRA, _LABEL, _WEIGHT = "dense column", "extra column", "label", "sample weight"
# Of an optimizer: what may change, and what has no effect.
_NOT_RECORDED = frozenset(
    {"learning_rate", "slot_variable_creation_fn", "low_dimensional_packing_status", "allow_zero_accumulator"}
)
_RULE = "optimizer"
# A table that its declaration gave no name, see `JobConfig.table_names`.
_UNNAMED = re.compile(r"table_\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyRecord:
    """The values of a vocabulary: the path of its file, for people, how many, and the digest of them in their order."""

    path: str
    num_values: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRecord:
    """The way from the values of one feature to rows of a table, and to a vector.

    Attributes:
      name: name of the feature.
      table: its name.
      settings: JSON text of each. One that does nothing, such as the salt of a column that is not hashed, is left out.
      vocabulary: of its column; None without one.
    """

    name: str
    table: str
    settings: Mapping[str, str]
    vocabulary: VocabularyRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRecord:
    """The way from another column to a label or a number of the model. `kind` is one of those above."""

    kind: str
    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRuleRecord:
    """The row optimizer of one table: its constants, and as `optimizer` which one it is; JSON text of each."""

    table: str
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeaningRecord:
    """All of a job's: `features` and `columns` in their order, `optimizers` of each table that has one."""

    features: tuple[FeatureRecord, ...]
    columns: tuple[ColumnRecord, ...]
    optimizers: tuple[UpdateRuleRecord, ...]


def meaning_of(job: JobConfig, index: InputIndex | None = None) -> MeaningRecord:
    """The record of a job.

    Args:
      index: of its training files, whose vocabularies are known; None reads those.

    Raises:
      InputError: a vocabulary cannot be read.
    """
    data, names = job.resolved_data, {id(table): name for table, name in zip(job.tables, job.table_names, strict=True)}
    vocabularies = _vocabularies(data.vocabularies, index)
    features, shapes, kinds = [], job.activation_shapes, _kinds(data, index)
    for name, column in data.id_columns.items():
        table = job.features[name].table
        settings = _id_settings(column) | _holds(column, kinds)
        settings |= {"combiner": job.features[name].combiner, "quantization": table.quantization_config}
        settings |= _vocabulary_settings(table)
        settings |= {"negatives": column.negatives, "shape": shapes[name]}
        features.append(
            FeatureRecord(
                name=name,
                table=names[id(table)],
                settings=_texts(settings),
                vocabulary=vocabularies.get(column.vocabulary or ""),
            )
        )
    declared = [(_DENSE, one, one.name) for one in data.dense_columns]
    declared += [(_EXTRA, one, one.name) for one in data.extra_columns]
    columns = [
        ColumnRecord(kind=kind, name=name, settings=_texts({"kind": type(one).__name__} | _fields(one, {"name"})))
        for kind, one, name in declared
    ]
    columns += [
        ColumnRecord(kind=_LABEL, name=one.name, settings=_texts({"missing": one.missing}))
        for one in data.label_columns
    ]
    if data.sample_weight is not None:
        columns.append(ColumnRecord(kind=_WEIGHT, name=data.sample_weight, settings={}))
    optimizers = [
        UpdateRuleRecord(
            table=spec.name,
            settings=_texts({_RULE: type(spec.optimizer).__name__} | _fields(spec.optimizer, _NOT_RECORDED)),
        )
        for spec in table_specs(job, (None,) * len(job.tables))
        if spec.optimizer is not None
    ]
    return MeaningRecord(features=tuple(features), columns=tuple(columns), optimizers=tuple(optimizers))


def changes_of_run(before: MeaningRecord, now: MeaningRecord) -> list[str]:
    """Differences where a run goes on, a phrase each.

    Args:
      before: as the run has recorded it.
      now: meaning of the job as it is.
    """
    return [
        *_feature_order(before, now),
        *(phrase for one in now.features for phrase in _feature_changes(_named(before.features, one.name), one)),
        *_column_changes(before, now, (_DENSE, _EXTRA, _LABEL, _WEIGHT)),
        *(
            f"optimizer of table '{one.table}': {phrase}"
            for one in now.optimizers
            for phrase in _rule_changes(before, one.table, one)
        ),
    ]


def changes_of_shared_rows(before: MeaningRecord, now: MeaningRecord) -> list[str]:
    """Tables whose buckets begin with a shared row and did not before, or the other way; whatever is accepted, rows of
    keys would be taken for shared ones. A phrase each.
    """
    found = []
    for one in now.features:
        was = _named(before.features, one.name)
        defaults = [record.settings.get("default") for record in (was, one) if record is not None]
        if len(defaults) == 2 and None not in defaults and len({text == '"shared"' for text in defaults}) == 2:
            found.append(f"feature '{one.name}': found default={defaults[1]}, expected {defaults[0]}")
    return found


def changes_of_scoring(before: MeaningRecord, now: MeaningRecord, *, free: Collection[str] = ()) -> list[str]:
    """Differences in all that scores depend on, a phrase each.

    Args:
      before: as the run has recorded it.
      now: meaning of the job that scores.
      free: settings that may differ.
    """
    compared = ACTIVATION_SETTINGS - set(free)
    return [
        *_feature_order(before, now),
        *(
            phrase
            for one in now.features
            for phrase in _feature_changes(_named(before.features, one.name), one, compared)
        ),
        *_column_changes(before, now, (_DENSE,)),
        *_column_changes(before, now, (_EXTRA,), only_common=True),
    ]


def changes_of_table(
    before: MeaningRecord, now: MeaningRecord, *, source: str, table: str, is_chosen: bool, with_slots: bool
) -> list[str]:
    """Why rows of a table of another run would not mean in a table of the job what they meant there, a phrase each.

    Features may have other names and columns, but each must find its rows in the way of one that was trained.

    Args:
      before: of the other run.
      now: meaning of the job.
      source, table: their names there and here.
      is_chosen: whether a rule names the table. Otherwise tables without names, which are found by their position,
        must share a feature or a column.
      with_slots: whether slots are loaded as well.
    """
    there = [one for one in before.features if one.table == source]
    here = [one for one in now.features if one.table == table]
    if not there:
        return []
    if not is_chosen and _UNNAMED.fullmatch(table) and not _share_name(there, here):
        alike = [one.table for one in before.features if _share_name([one], here)]
        return [
            f"it has no name, and is looked up by {_names_of(here)}, in the commit by {_names_of(there)}; name the "
            f"tables, or say by {table}=rename={alike[0] if alike else 'OLD'} which is meant"
        ]
    found = []
    for feature in here:
        candidates = [one for one in there if one.name == feature.name]
        candidates += [one for one in there if one not in candidates and _share_name([one], [feature])]
        candidates += [one for one in there if one not in candidates]
        ways = [
            _feature_changes(one, feature, ROW_SETTINGS, is_same_table=True) + _changes_of_hashes(one, feature)
            for one in candidates
        ]
        found += [] if [] in ways else ways[0]
    if with_slots:
        rule = next((one for one in now.optimizers if one.table == table), None)
        found += [f"its optimizer: {phrase}" for phrase in (_rule_changes(before, source, rule) if rule else [])]
    return found


def _changes_of_hashes(before: FeatureRecord, now: FeatureRecord) -> list[str]:
    """A table of row numbers has rows for hashes modulo its size, from which the hashes do not follow."""
    is_dynamic = ["capacity" in record.settings for record in (before, now)]
    if is_dynamic != [False, True] or now.settings["mode"] != '"hash"':
        return []
    return [f"feature '{now.name}': found whole hashes as keys, expected hashes modulo the number of rows"]


def changes_of_dense_input(before: MeaningRecord, now: MeaningRecord) -> list[str]:
    """Why the dense model of another run would take the numbers and vectors of the job for others, a phrase each.
    Features of the same name are compared.
    """
    same = {one.name for one in before.features} & {one.name for one in now.features}
    left = [replace(record, features=tuple(f for f in record.features if f.name in same)) for record in (before, now)]
    return [
        *_feature_order(*left),
        *(
            phrase
            for one in now.features
            if one.name in same
            for phrase in _feature_changes(
                _named(before.features, one.name), one, {"combiner", "quantization"}, is_same_table=True, is_way=False
            )
        ),
        *_column_changes(before, now, (_DENSE,)),
        *_column_changes(before, now, (_EXTRA,), only_common=True),
    ]


def _id_settings(column: IdColumn) -> dict[str, Any]:
    """The settings of an id column that do something in its mode."""
    found: dict[str, Any] = {
        "column": column.column,
        "mode": column.mode,
        "missing": column.missing,
        "unit": column.unit,
        "since": column.since,
        "boundaries": column.boundaries,
        "crossed_with": [
            {"column": part.column, "unit": part.unit, "since": part.since, "boundaries": part.boundaries}
            for part in column.parts[1:]
        ],
        "weights": column.weights,
        "last": column.last,
    }
    if column.mode == "hash":
        return found | {"salt": column.salt}
    if column.mode == "vocabulary":
        return found | {"num_reserved": column.num_reserved}
    return found | {"invalid_ids": column.outside}


def _vocabulary_settings(table: TableConfig) -> dict[str, Any]:
    """Which keys of a table get and lose their rows, and what others are looked up as."""
    keys = table.dynamic_keys
    if keys is None:
        return {}
    # The name of a policy says more than its numbers.
    policies = {"admit": repr(keys.admit), "evict": repr(keys.evict)}
    return {name: getattr(keys, name) for name in ("capacity", "forget_after", "waiting", "default")} | policies


def _kinds(data: InputData, index: InputIndex | None) -> dict[str, str]:
    """The kind of each id column: whether it has integers, text, times or durations, as files or their declaration say
    it.
    """
    contents = [file.content for file in index.files if file.content] if index is not None else []
    kinds: dict[str, str] = {}
    for content in contents or [declared_content(data)]:
        for column, kind in kinds_of(content).items():
            kind = kind.removeprefix("lists of ").replace("numbers", "integers")
            if kind != NULLS:
                kinds.setdefault(column, kind)
    return kinds


def _holds(column: IdColumn, kinds: Mapping[str, str]) -> dict[str, Any]:
    """The kinds of values, since equal ones of another kind become other rows; nothing where one is not known, or where
    text and integers are the same lines of a vocabulary.
    """
    found = [kinds.get(part.column) for part in column.parts]
    return {} if column.mode == "vocabulary" or None in found else {"holds": found[0] if len(found) == 1 else found}


def kinds_held(record: MeaningRecord, columns: Mapping[str, IdColumn]) -> dict[str, str]:
    """The kind of values of each column that the features of these names had.

    Args:
      columns: columns of the features, by their names; columns may have other names than in the record.
    """
    kinds: dict[str, str] = {}
    for feature in record.features:
        if feature.name in columns and "holds" in feature.settings:
            held = json.loads(feature.settings["holds"])
            held = [held] if isinstance(held, str) else held
            kinds |= dict(zip((part.column for part in columns[feature.name].parts), held, strict=False))
    return kinds


def _vocabularies(paths: Sequence[str], index: InputIndex | None) -> dict[str, VocabularyRecord]:
    if index is not None:
        return {
            path: VocabularyRecord(path=path, num_values=file.num_rows, digest=file.content)
            for path, file in zip(paths, index.vocabularies, strict=True)
        }
    loaded = {path: load_vocabulary(path) for path in paths}
    return {
        path: VocabularyRecord(path=path, num_values=one.num_values, digest=one.digest(one.num_values))
        for path, one in loaded.items()
    }


def _fields(declared: Any, without: Collection[str]) -> dict[str, Any]:
    return {
        field.name: getattr(declared, field.name) for field in dataclasses.fields(declared) if field.name not in without
    }


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value, sort_keys=True, default=_plain) for name, value in settings.items()}


def _plain(value: Any) -> Any:
    """What JSON does not know: values of a declaration, numbers of numpy or JAX, and functions, by their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value, ())
    if isinstance(value, Mapping):
        return dict(value)
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    try:
        return float(value)
    except (TypeError, ValueError):
        return type(value).__name__


def _named(features: Sequence[FeatureRecord], name: str) -> FeatureRecord | None:
    return next((one for one in features if one.name == name), None)


def _names_of(features: Sequence[FeatureRecord]) -> str:
    return ", ".join(f"'{one.name}'" for one in features)


def _share_name(there: Sequence[FeatureRecord], here: Sequence[FeatureRecord]) -> bool:
    """Whether some of the features have the same name or column."""
    names = [{one.name for one in features} for features in (there, here)]
    columns = [{one.settings.get("column") for one in features} for features in (there, here)]
    return bool(names[0] & names[1] or columns[0] & columns[1])


def _feature_order(before: MeaningRecord, now: MeaningRecord) -> list[str]:
    found, expected = ([one.name for one in record.features] for record in (now, before))
    if found == expected:
        return []
    return [f"features: found {', '.join(found)}, expected {', '.join(expected)}, in this order"]


def _feature_changes(
    before: FeatureRecord | None,
    now: FeatureRecord,
    compared: Collection[str] | None = None,
    *,
    is_same_table: bool = False,
    is_way: bool = True,
) -> list[str]:
    """The differences of one feature.

    Args:
      before: None where there was none, which `_feature_order` tells.
      compared: settings; None compares all.
      is_same_table: tables may have other names.
      is_way: compare vocabularies as well.
    """
    if before is None:
        return []
    where = f"feature '{now.name}' (column {now.settings.get('column', '?')})".replace('"', "'")
    found = [f"found table '{now.table}', expected '{before.table}'"] * (now.table != before.table)
    found = [] if is_same_table else found
    found += _setting_changes(before.settings, now.settings, compared)
    if is_way:
        found += _vocabulary_changes(before.vocabulary, now.vocabulary, _digest_of_first)
    return [f"{where}: {phrase}" for phrase in found]


def _setting_changes(
    before: Mapping[str, str], now: Mapping[str, str], compared: Collection[str] | None = None
) -> list[str]:
    """Settings that both records have: what one version does not record is not known to differ."""
    return [
        f"found {name}={now[name]}, expected {before[name]}"
        for name in now
        if name in before
        and (compared is None or name in compared)
        and json.loads(now[name]) != json.loads(before[name])
        # Where ids outside the table were refused, no row was trained on them.
        and not (name == "invalid_ids" and '"error"' in (before[name], now[name]))
    ]


def _vocabulary_changes(
    before: VocabularyRecord | None, now: VocabularyRecord | None, digest_of_first: Callable[[str, int], str]
) -> list[str]:
    """A vocabulary may grow at its end. One in the place of none is another mode."""
    if before is None or now is None or before.digest == now.digest:
        return []
    if now.num_values < before.num_values:
        return [f"found {now.num_values:,} values in the vocabulary {now.path}, expected {before.num_values:,} or more"]
    if now.num_values > before.num_values and digest_of_first(now.path, before.num_values) == before.digest:
        return []
    return [
        f"found other values, or another order, in the first {before.num_values:,} lines of the vocabulary {now.path}, "
        "expected them as they were, and new ones behind them"
    ]


def _digest_of_first(path: str, num_values: int) -> str:
    return load_vocabulary(path).digest(num_values)


def _column_changes(
    before: MeaningRecord, now: MeaningRecord, kinds: Collection[str], *, only_common: bool = False
) -> list[str]:
    found = []
    for kind in kinds:
        there, here = ({one.name: one for one in record.columns if one.kind == kind} for record in (before, now))
        # Extra columns come by name, the others by their order.
        is_same = set(there) == set(here) if kind == _EXTRA else list(there) == list(here)
        if not is_same and not only_common:
            names = [", ".join(record) or "none" for record in (here, there)]
            found.append(f"{kind}s: found {names[0]}, expected {names[1]}{'' if kind == _EXTRA else ', in this order'}")
        found += [
            f"{kind} '{name}': {phrase}"
            for name in here
            if name in there
            for phrase in _setting_changes(there[name].settings, here[name].settings)
        ]
    return found


def _rule_changes(before: MeaningRecord, source: str, now: UpdateRuleRecord) -> list[str]:
    """The differences of a table's optimizer. Constants of another optimizer say nothing more."""
    was = next((one for one in before.optimizers if one.table == source), None)
    if was is None:
        return []
    return _setting_changes(was.settings, now.settings, {_RULE}) or _setting_changes(was.settings, now.settings)
