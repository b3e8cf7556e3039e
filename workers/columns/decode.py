"""Arrow columns of one row group to a `Block`, and the checks of types and values on the way.

This is where columns become model inputs (`DenseColumn`), labels, weights and, by `workers.columns.id_columns`, row
ids. Whole columns at a time, no loop over rows in Python. A value that is refused is looked up afterwards, so that the
error names its file, row group, row and column. Reading the file is the business of `workers.formats.registry`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from podembed.embedding.ragged import Ragged
from podembed.workers.columns import id_columns as id_stage
from podembed.workers.columns.extra_columns import accepts, expected, take_extra
from podembed.workers.columns.gather import Block
from podembed.workers.columns.id_columns import NULLS, BagLayouts, IdStage
from podembed.workers.columns.numbers import filled, numbers_of, refuse_nulls, required_numbers, take_dense, take_labels
from podembed.workers.columns.vocabulary import Vocabulary
from podembed.workers.data.bad_rows import BadRow, Origin, RowFaults
from podembed.workers.data.batch import PADDING_SAMPLE_ID, Batch
from podembed.workers.data.columns import DenseColumn, IdColumn
from podembed.workers.data.config import InputData
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.times import TimeScale, is_time, words_of
from podembed.workers.data.unknown_values import UnknownColumn

# In the record of what the columns of a file hold.
_BETWEEN = ", "
_KIND = re.compile(r"(.+?): ((?:lists of )?(?:integers|numbers|text|times|durations|nulls))(?:, |$)", re.DOTALL)


class Columns(Protocol):
    """The declared columns of one row group as a file gives them, one entry for each of its rows. They may be read on
    request.
    """

    def column(self, name: str) -> pa.ChunkedArray: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RawRows:
    """One row group on the way from a file to the decoder.

    Attributes:
      columns: requested in the order of `InputData.columns`, each once; a `pa.Table` will do.
      faults: rows that are malformed already; what stands in their columns is of no account.
    """

    columns: Columns
    faults: RowFaults


def check_schema(schema: pa.Schema, data: InputData, *, path: str) -> None:
    """Checks that a file has every declared column in a type that can be decoded.

    Raises:
      InputError: a column is missing or of a wrong type.
    """
    number = "an integer, float or boolean column"
    for label in data.label_columns:
        _check_column(schema, label.name, _is_number, number, path=path)
    for column in (*data.dense_columns, *data.extra_columns):
        if isinstance(column, DenseColumn):
            numbers = _expected_times(column.scale, f"{number}, or one of dates or times")
            _check_column(schema, column.name, lambda kind, column=column: _is_dense(kind, column), numbers, path=path)
        else:
            _check_column(
                schema, column.name, lambda kind, column=column: accepts(kind, column), expected(column), path=path
            )
    for source in data.id_columns.values():
        for part in source.parts:
            _check_column(
                schema,
                part.column,
                lambda kind, part=part: id_stage.accepts(kind, part),
                _expected_ids(part),
                path=path,
            )
        if source.weights is not None:
            has_lists = id_stage.is_list(schema.field(source.column).type)
            _check_column(
                schema,
                source.weights,
                lambda kind, has_lists=has_lists: id_stage.is_numbers(kind) and id_stage.is_list(kind) == has_lists,
                f"a column of {'lists of ' if has_lists else ''}numbers, one for each id of {source.column!r}",
                path=path,
            )
    if data.sample_weight is not None:
        _check_column(schema, data.sample_weight, _is_number, number, path=path)
    if data.sample_id is not None:
        _check_column(schema, data.sample_id, pa.types.is_integer, "a column of integers", path=path)


def id_kinds(schema: pa.Schema, data: InputData) -> str:
    """What the id columns of a checked schema hold, and dense columns of times, a few words for each. With other words
    equal values would become other rows or numbers.
    """
    parts = [part for source in data.id_columns.values() for part in source.parts]
    kinds: dict[str, str] = {}
    # What a column holds as ids says more than what it holds as numbers.
    for part in sorted(parts, key=lambda part: bool(part.boundaries)):
        kinds.setdefault(part.column, id_stage.kind_of(schema.field(part.column).type, part))
    for column in data.dense_columns:
        # Numbers are not noted: they were not before there were others.
        if is_time(kind := schema.field(column.name).type):
            kinds[column.name] = words_of(kind)
    return _BETWEEN.join(f"{name}: {words}" for name, words in kinds.items())


def extra_kinds(schema: pa.Schema, data: InputData) -> str:
    """What the extra columns of a checked schema hold, in the same words: times or durations become other numbers."""
    kinds = {}
    for column in data.extra_columns:
        kind = schema.field(column.name).type
        item = kind.value_type if id_stage.is_list(kind) else kind
        # For a dense column a missing time is malformed and a missing number is 0, so it needs the kind.
        is_open = id_stage.is_null(item) and not isinstance(column, DenseColumn)
        kinds[column.name] = words_of(item) if is_time(item) else NULLS if is_open else "numbers"
    return _BETWEEN.join(f"{name}: {words}" for name, words in kinds.items())


def kinds_of(content: str) -> dict[str, str]:
    """Column to its words, of what `id_kinds` made; empty for sources whose declaration says what columns hold."""
    return dict(_KIND.findall(content))


class Decoder:
    """Decodes row groups of declared data. Calls change nothing but what `take_unknown` gives."""

    def __init__(self, data: InputData, vocabularies: Mapping[str, Vocabulary] | None = None) -> None:
        """Prepares the features.

        Args:
          data: resolved, so every `IdColumn` knows its vocabulary size.
          vocabularies: path to its values, for every path that `data` names.

        Raises:
          InputError: the data is not resolved, or a vocabulary does not fit its table.
        """
        self._data = data
        self._shared = data.shared_columns
        given = vocabularies or {}
        self._stages = {
            name: IdStage(source, None if source.vocabulary is None else given[source.vocabulary])
            for name, source in data.id_columns.items()
        }
        largest = max((source.vocabulary_size or 0 for source in data.id_columns.values()), default=0)
        # As narrow as it goes: rows wait in memory for their step, and are copied once more on the way.
        is_wide = largest > 1 << 31 or any(source.outside != "error" for source in data.id_columns.values())
        self._id_dtype = np.int64 if is_wide else np.int32

    def faults_of(self, origin: Origin, num_rows: int) -> RowFaults:
        """An empty account of a row group's malformed rows, which are tolerated if the data declares so."""
        return RowFaults(origin, num_rows, tolerated=self._data.max_bad_rows > 0)

    def take_unknown(self) -> list[UnknownColumn]:
        """Columns of which no value was in their vocabulary so far; each once."""
        found = (stage.take_unknown() for stage in self._stages.values())
        return [one for one in found if one is not None]

    def decode(
        self, raw: RawRows, *, first_position: int, order: np.ndarray | None = None
    ) -> tuple[Block, list[BadRow]]:
        """Turns rows of one row group into a block.

        Args:
          raw: the columns `data.columns`.
          first_position: sample id of the group's first row where `data.sample_id` is None.
          order: int64, the rows of the group to decode, in that order; None for all as they come.

        Returns:
          The rows, malformed ones as padding, and the malformed rows among them.

        Raises:
          InputError: a value is refused, and malformed rows are not tolerated. Refused are an id outside its table, a
          null or non-finite label or weight, and a non-finite dense number.
        """
        faults = raw.faults
        order = np.arange(len(faults.is_bad)) if order is None else order
        # Half as wide: the order is read once for every column.
        places = order.astype(np.uint32) if len(faults.is_bad) < 1 << 32 else order
        # One array of offsets for all features with one id a row: see the comment in workers/data/batch.py.
        layouts = BagLayouts(len(order))
        one_each = layouts.even(1)
        singles = np.empty((len(self._stages), len(order)), self._id_dtype)
        columns = _Given(raw.columns, self._shared)
        named = {
            label.name: take_labels(columns.get(label.name), label, places, faults)
            for label in self._data.label_columns
        }
        labels = named.pop(self._data.label, None)
        # Column after column, as they come; `workers.columns.gather` makes rows of them.
        dense = self._dense(columns, places, faults)
        for column in self._data.extra_columns:
            named |= take_extra(columns.get(column.name), column, places, faults)
        features: dict[str, Ragged] = {}
        num_singles = 0
        for name, stage in self._stages.items():
            features[name] = stage.rows(
                [columns.get(column) for column in stage.source.columns],
                places,
                singles=singles[num_singles],
                layouts=layouts,
                faults=faults,
            )
            num_singles += features[name].row_splits is one_each
        rows = Batch(
            dense=dense,
            # Without a column of labels every sample is a positive one. Predictions have none at all.
            labels=np.full(len(order), self._data.has_labels, np.float32) if labels is None else labels,
            weights=self._weights(columns, places, faults),
            features=features,
            sample_ids=self._sample_ids(columns, order, first_position, faults),
            columns={name: named[name] for name in self._data.column_shapes},
        )
        single_names = tuple(name for name, bags in features.items() if bags.row_splits is one_each)
        if not faults.is_bad.any() or not (is_bad := faults.is_bad[order]).any():
            return Block(rows=rows, single_names=single_names, singles=singles[:num_singles]), []
        return Block(rows=_blanked(rows, is_bad), single_names=(), singles=singles[:0]), faults.among(order)

    def _dense(self, columns: _Given, order: np.ndarray, faults: RowFaults) -> np.ndarray:
        """float32 `[len(order), num_dense]`."""
        dense = np.empty((self._data.num_dense, len(order)), np.float32).T
        at = 0
        for declared in self._data.dense_columns:
            column, stop = columns.get(declared.name), at + declared.shape.size
            if isinstance(declared, DenseColumn):
                take_dense(column, declared, order, dense[:, at], faults)
            else:
                dense[:, at:stop] = take_extra(column, declared, order, faults)[declared.name]
            at = stop
        return dense

    def _weights(self, columns: _Given, order: np.ndarray, faults: RowFaults) -> np.ndarray:
        name = self._data.sample_weight
        if name is None:
            return np.ones(len(order), np.float32)
        column = columns.get(name)
        weights = required_numbers(column, name, order, faults)
        # Not by the least: with a NaN among the weights, which another row may have, there is none.
        if (weights < 0).any():
            reason = "Weights are 0 or more. Clean the data."
            numbers = numbers_of(filled(column))
            faults.add(numbers < 0, name, found=lambda row: str(numbers[row]), reason=reason)
        return weights

    def _sample_ids(self, columns: _Given, order: np.ndarray, first_position: int, faults: RowFaults) -> np.ndarray:
        name = self._data.sample_id
        if name is None:
            return order + first_position
        column = columns.get(name)
        refuse_nulls(column, name, faults)
        ids = filled(column).to_numpy(zero_copy_only=False)
        bad = (ids < 0) | (ids > np.iinfo(np.int64).max)
        reason = "Sample ids are 0 or more and fit int64; -1 means padding. Renumber them."
        faults.add(bad, name, found=lambda row: str(ids[row]), reason=reason)
        return ids.astype(np.int64)[order]


class _Given:
    """The columns of one row group. One that several features are made of is kept; others are let go of once they are
    used.
    """

    def __init__(self, columns: Columns, shared: Set[str]) -> None:
        self._columns = columns
        self._shared = shared
        self._kept: dict[str, pa.Array] = {}

    def get(self, name: str) -> pa.Array:
        if name in self._kept:
            return self._kept[name]
        column = self._columns.column(name)
        array = _joined(column)
        if name in self._shared:
            self._kept[name] = array
        return array


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """All values in one array. Columns without a value have the type null, as no writer knows better; integers or lists
    of them stand for theirs, all missing.
    """
    kind = column.type
    if id_stage.is_null(kind):
        return pa.nulls(len(column), pa.int64())
    if id_stage.is_list(kind) and id_stage.is_null(kind.value_type):
        column = column.cast(pa.list_(pa.int64()))
    if column.num_chunks == 1:
        # Combining copies even a single chunk, which is what a row group nearly always is.
        return column.chunk(0)
    # Text of more than 2 GiB comes in chunks, and one array of it needs offsets of 64 bits.
    chunks = [id_stage.plain(chunk) if id_stage.is_text(kind) else chunk for chunk in column.chunks]
    return pa.concat_arrays(chunks) if chunks else pa.nulls(0, kind)


def _blanked(rows: Batch, is_bad: np.ndarray) -> Batch:
    """The rows of a mask become padding where they stand."""
    is_good = ~is_bad
    features = {}
    for name, bags in rows.features.items():
        lengths = np.diff(bags.row_splits)
        splits = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths * is_good, out=splits[1:])
        kept = np.repeat(is_good, lengths)
        features[name] = Ragged(bags.values[kept], splits, None if bags.weights is None else bags.weights[kept])
    return Batch(
        dense=np.where(is_bad[:, None], np.float32(0), rows.dense),
        labels=np.where(is_bad, np.float32(0), rows.labels),
        weights=np.where(is_bad, np.float32(0), rows.weights),
        features=features,
        sample_ids=np.where(is_bad, PADDING_SAMPLE_ID, rows.sample_ids),
        columns={name: _without(values, is_bad) for name, values in rows.columns.items()},
    )


def _without(values: np.ndarray, is_bad: np.ndarray) -> np.ndarray:
    values = values.copy()
    values[is_bad] = 0
    return values


def _check_column(
    schema: pa.Schema, name: str, accepts: Callable[[pa.DataType], bool], expected: str, *, path: str
) -> None:
    at = schema.get_all_field_indices(name)
    if len(at) != 1:
        found = f"{len(at)} columns" if at else "no column"
        raise InputError(
            f"Found {found} named {name!r} in {path}. Expected {expected} of that name among {schema.names}. "
            "Correct the name in the job's data, or write the column."
        )
    if not accepts(schema.field(at[0]).type):
        raise InputError(
            f"Found column {name!r} of type {schema.field(at[0]).type} in {path}. Expected {expected}. "
            "Cast it when the files are written; strings need mode='hash' or a vocabulary."
        )


def _expected_ids(source: IdColumn) -> str:
    if source.boundaries:
        return _expected_times(source.scale, "a column of numbers or times, or of lists of numbers")
    if source.mode == "as_is" and source.outside != "any":
        return _expected_times(source.scale, "a column of integers or times, or of lists of integers")
    ids = "a column of integers, strings or times, or of lists of integers or strings"
    return _expected_times(source.scale, ids)


def _expected_times(scale: TimeScale, otherwise: str) -> str:
    if scale == TimeScale():
        return otherwise
    return (
        "a column of dates or timestamps"
        + ("" if scale.since else ", times of day or durations")
        + ", for which a unit or an origin is declared"
    )


def _is_dense(kind: pa.DataType, column: DenseColumn) -> bool:
    return column.scale.accepts(kind) or (_is_number(kind) and column.scale == TimeScale())


def _is_number(kind: pa.DataType) -> bool:
    return (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or id_stage.is_null(kind)
    )
