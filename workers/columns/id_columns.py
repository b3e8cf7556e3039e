"""From the values of one column to rows of its table: the one place where padding, nulls and unseen values are decided.

What becomes of a value, by the mode of its `IdColumn`:

| value | `as_is` | `hash` | `vocabulary` |
|---|---|---|---|
| integer | the row of that number | 1 + mix64(value, salt) mod (size - 1) | num_reserved + its line |
| string | refused by the schema check | the same of its 64-bit key (`string_keys`) | num_reserved + its line |
| date or time | the row of its whole number of units (`times`) | the same of that number | the same |
| number, with `boundaries` | first_row + its bucket (`raw_values`) | of its bucket, as any integer | - |
| values of several columns, `crossed_with` | - | of the key that they make (`raw_values`) | - |
| integer outside [0, size) | malformed row, or itself (`outside`) | as any other | as any other |
| value that the vocabulary does not have | - | - | row 0 |
| null or empty string, `missing="empty"` | no id | no id | no id |
| null or empty string, `missing="zero"` | row 0 | row 0 (default) | row 0 |
| null or empty string within a list | as above, each on its own | | |
| null instead of a list | as a null value: no id, or one id 0 | | |
| empty list | no id | no id | no id |
| padding (tail of an epoch, malformed row) | no id, weight 0, sample id -1 | | |

Where keys come and go (`outside="any"`), no integer is outside. With `as_is` a value is its key, a text the 64 bits of
`string_keys`; with `hash` the key is mix64(value, salt).

An id has the weight that stands in its place among the `weights`; a null instead of a list that becomes row 0 has 1.
A sample without ids has an activation of zeros. Row 0 is never the hash of a value nor the row of a line, so with these
modes nothing else is trained into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from podembed.embedding.hashing import combine
from podembed.embedding.ragged import Ragged
from podembed.workers.columns.column_kernels import (
    even_length,
    frozen,
    hash_in_place,
    mix_in_place,
    narrow,
    take_bags,
    take_even_bags,
    take_ids,
    take_splits,
)
from podembed.workers.columns.raw_values import (
    bucket_numbers,
    crossed_keys,
    is_list,
    list_lengths,
    null_mask,
    weights_of,
)
from podembed.workers.columns.string_keys import string_keys
from podembed.workers.columns.vocabulary import OUT_OF_VOCABULARY, Vocabulary, text_of
from podembed.workers.data.bad_rows import RowFaults
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.times import TimeScale, is_time, shown, words_of
from podembed.workers.data.unknown_values import LEAST_VALUES, LOOKED_AT, UnknownColumn, likely_cause

NULLS = "nulls"
"""The kind of a column without a value in a file; it fits all others."""

# Its functions are made when it is imported, so type checkers do not know them.
pc: Any = pyarrow.compute


class BagLayouts:
    """Offsets of bags that all have as many ids, for a number of samples. Features with the same lengths share one
    array, so what is done with offsets afterwards is done once. Filled by `even`.
    """

    def __init__(self, num_samples: int) -> None:
        self._counts = np.arange(num_samples + 1)
        self._by_length = {1: self._counts}

    def even(self, length: int) -> np.ndarray:
        """int64 `[num_samples + 1]`; the same array for the same length."""
        if length not in self._by_length:
            self._by_length[length] = self._counts * length
        return self._by_length[length]


class IdStage:
    """Turns columns of one feature into rows. Mutated by `rows`: what `take_unknown` gives; one thread at a time."""

    def __init__(self, source: IdColumn, vocabulary: Vocabulary | None) -> None:
        """Raises:
        InputError: the column is not resolved, or the vocabulary has more values than the table has rows.
        """
        if source.vocabulary_size is None:
            raise InputError(
                f"Found no vocabulary_size for id column {source.column!r}. Expected the rows of its table. Call "
                "ParquetData.resolved first."
            )
        if (source.mode == "vocabulary") != (vocabulary is not None):
            raise InputError(
                f"Found id column {source.column!r} in mode {source.mode!r} "
                f"{'without' if vocabulary is None else 'with'} a vocabulary. Expected one in the mode 'vocabulary' "
                "alone."
            )
        if vocabulary is not None and source.num_reserved + vocabulary.num_values > source.vocabulary_size:
            raise InputError(
                f"Found {vocabulary.num_values:,} values in {vocabulary.path} and {source.num_reserved} reserved rows "
                f"for id column {source.column!r}, whose table has {source.vocabulary_size:,} rows. Expected as many "
                f"rows. Set vocabulary_size={source.num_reserved + vocabulary.num_values}, or shorten the vocabulary."
            )
        self.source = source
        self._size, self._takes_any = source.vocabulary_size, source.outside == "any"
        self._vocabulary = vocabulary
        # Values so far, all of them unknown; None once one is known, or all was said.
        self._num_unknown = None if vocabulary is None else 0
        self._unknown: UnknownColumn | None = None
        self._offset = np.uint64(combine(source.salt) if source.salt else 0)

    def take_unknown(self) -> UnknownColumn | None:
        """What to say, once, of a column of which no value was in its vocabulary so far."""
        unknown, self._unknown = self._unknown, None
        return unknown

    def rows(
        self,
        columns: Sequence[pa.Array],
        order: np.ndarray,
        *,
        singles: np.ndarray,
        layouts: BagLayouts,
        faults: RowFaults,
    ) -> Ragged:
        """The rows of the table for the samples `order`, in that order; of lists the last ones, if that is declared.

        Args:
          columns: columns of `IdColumn.columns`, of all samples of a row group.
          order: uint32 or int64, samples of the row group.
          singles: int32 or int64 `[len(order)]`, wide enough for rows of the table. Receives the ids if every sample
            has exactly one value, and is then the result's `values`, with `layouts.even(1)` as its `row_splits`. Other
            results have values of the same width. Ids with weights are never put there.
          layouts: layouts of bags in `len(order)` samples.
          faults: faults of the row group.

        Raises:
          InputError: a value is refused, and malformed rows are not tolerated.
        """
        bags = self._all_rows(columns, order, singles=singles, layouts=layouts, faults=faults)
        return bags if self.source.last is None else _last_of(bags, self.source.last, layouts)

    def _all_rows(
        self,
        columns: Sequence[pa.Array],
        order: np.ndarray,
        *,
        singles: np.ndarray,
        layouts: BagLayouts,
        faults: RowFaults,
    ) -> Ragged:
        """As `rows`, of whole lists."""
        column = self._values_of(columns, faults)
        has_lists = is_list(column.type)
        items = column.flatten() if has_lists else column
        if self.source.weights is not None:
            bags = self._bags_with_gaps(column, items, has_lists=has_lists, faults=faults, weights=columns[-1])
            return _taken_with_weights(bags, order, singles.dtype)
        if not pa.types.is_integer(items.type) or items.null_count or column.null_count:
            bags = self._bags_with_gaps(column, items, has_lists=has_lists, faults=faults)
            # Not by row as below: rows without an id have none in the source.
            return self._taken(frozen(bags.values, np.int64), bags.row_splits, order, singles, layouts)[0]
        raw = self._rows_of_integers(items)
        self._look(items, raw, faults)
        offsets = _offsets(column) if has_lists else None
        bags, is_inside = self._taken(raw, offsets, order, singles, layouts)
        if self.source.outside != "error":
            self._refuse_beyond_int64(items, offsets, faults)
        elif not is_inside:
            self._refuse_outside(items, offsets, faults)
        return bags

    def _values_of(self, columns: Sequence[pa.Array], faults: RowFaults) -> pa.Array:
        """Integers or large strings, or lists of them; nulls stay, to become what is declared for missing ids."""
        parts = self.source.parts
        values = [_values_of_part(column, part, faults) for column, part in zip(columns, parts, strict=False)]
        return values[0] if len(parts) == 1 else crossed_keys(values)

    def _taken(
        self,
        source: np.ndarray,
        offsets: np.ndarray | None,
        order: np.ndarray,
        singles: np.ndarray,
        layouts: BagLayouts,
    ) -> tuple[Ragged, bool]:
        """The bags `order` of int64 rows, one id each without `offsets`; and whether all are rows of the table."""
        length = 1 if offsets is None else even_length(frozen(offsets, offsets.dtype))
        if length == 1:
            return Ragged(singles, layouts.even(1)), take_ids(source, order, self._size, singles)
        # Narrowed as they come, which is fast, so that half the bytes are moved out of order, which is not.
        narrowed = np.empty(len(source), singles.dtype)
        is_inside = narrow(source, self._size, narrowed)
        if offsets is None or length >= 0:
            values = np.empty(len(order) * length, singles.dtype)
            take_even_bags(narrowed, length, order, values)
            return Ragged(values, layouts.even(length)), is_inside
        offsets = frozen(offsets, offsets.dtype)
        splits = np.empty(len(order) + 1, np.int64)
        take_splits(offsets, order, splits)
        values = np.empty(int(splits[-1]), singles.dtype)
        take_bags(narrowed, offsets, order, splits, values)
        return Ragged(values, splits), is_inside

    def _rows_of_integers(self, items: pa.Array) -> np.ndarray:
        """int64 of integers without nulls: rows by the mode, of which those `as_is` may lie outside the table."""
        raw = frozen(items.to_numpy(zero_copy_only=False), np.int64)
        if self._vocabulary is not None:
            return frozen(self._vocabulary.rows_of_integers(raw, num_reserved=self.source.num_reserved), np.int64)
        if self.source.mode == "hash":
            return frozen(self._hashed(raw.copy()), np.int64)
        return raw

    def _hashed(self, keys: np.ndarray) -> np.ndarray:
        """Rows, or keys that come and go, of the mode `hash`, in the place of int64 `keys`."""
        if self._takes_any:
            mix_in_place(keys, self._offset)
        else:
            hash_in_place(keys, self._offset, self._size - 1)
        return keys

    def _refuse_beyond_int64(self, items: pa.Array, offsets: np.ndarray | None, faults: RowFaults) -> None:
        """Unsigned ids that would come out negative. `items` have no nulls."""
        if items.type != pa.uint64() or self._takes_any:
            return
        raw = items.to_numpy(zero_copy_only=False)
        beyond = np.flatnonzero(raw > np.uint64(np.iinfo(np.int64).max))
        if len(beyond):
            samples = beyond if offsets is None else np.searchsorted(offsets, beyond, side="right") - 1
            self._add_outside(samples, raw[beyond], faults)

    def _refuse_outside(self, items: pa.Array, offsets: np.ndarray | None, faults: RowFaults) -> None:
        """Finds the samples with an id outside the table. `items` have no nulls."""
        raw = items.to_numpy(zero_copy_only=False)
        outside = np.flatnonzero((raw < 0) | (raw >= self._size))
        samples = outside if offsets is None else np.searchsorted(offsets, outside, side="right") - 1
        self._add_outside(samples, raw[outside], faults)

    def _add_outside(self, samples: np.ndarray, ids: np.ndarray, faults: RowFaults) -> None:
        bad = np.zeros(len(faults.is_bad), bool)
        bad[samples] = True
        reason = (
            f"Ids are 0 to {self._size - 1}. Enlarge vocabulary_size, or clean the data. Or say what such ids mean: "
            "TableConfig(invalid_ids='drop'), 'clip' or 'hash'. IdColumn(mode='hash') hashes all ids of the column."
        )
        first = np.searchsorted(samples, np.arange(len(bad)))
        faults.add(bad, self.source.column, found=lambda row: f"id {ids[first[row]]}", reason=reason)

    def _bags_with_gaps(
        self, column: pa.Array, items: pa.Array, *, has_lists: bool, faults: RowFaults, weights: pa.Array | None = None
    ) -> Ragged:
        """All samples in the order of the file, for columns of strings, for ids with weights, and for columns with
        nulls: of values, in lists, or of lists.
        """
        lengths = list_lengths(column)
        if not pa.types.is_integer(items.type):
            items = _without_empty(items)
        item_is_null = null_mask(items)
        present = items.drop_null() if items.null_count else items
        sample_of = np.repeat(np.arange(len(lengths)), lengths)[~item_is_null]
        rows = self._rows_of(present, lambda at: sample_of[at], faults)
        keeps_missing = self.source.missing == "zero"
        # Row 0 stands where an id is missing, so the present ones only have to be put around it.
        placed = np.zeros(len(items), np.int64)
        placed[~item_is_null] = rows
        kept = np.ones(len(items), bool) if keeps_missing else ~item_is_null
        kept_before = np.zeros(len(items) + 1, np.int64)
        np.cumsum(kept, out=kept_before[1:])
        name = self.source.weights
        own = None
        if weights is not None and name is not None:
            own = weights_of(weights, name, column, lambda: item_is_null, faults)[kept]
        bags = Ragged(placed[kept], kept_before[_splits(lengths)], own)
        if keeps_missing and has_lists and column.null_count:
            return _insert_zero_rows(bags, null_mask(column))
        return bags

    def _rows_of(
        self, present: pa.Array, sample_of: Callable[[np.ndarray], np.ndarray], faults: RowFaults
    ) -> np.ndarray:
        """int64 rows of values without nulls."""
        if self._vocabulary is not None:
            rows = vocabulary_rows(present, self._vocabulary, num_reserved=self.source.num_reserved)
            self._look(present, rows, faults)
            return rows
        if self.source.mode == "hash":
            return self._hashed(_keys(plain(present)))
        if self._takes_any:
            return _keys(plain(present))
        raw = present.to_numpy(zero_copy_only=False)
        is_refused = self.source.outside == "error"
        largest = self._size - 1 if is_refused else np.iinfo(np.int64).max
        smallest = 0 if is_refused else np.iinfo(np.int64).min
        outside = np.flatnonzero((raw < smallest) | (raw > largest))
        if len(outside):
            self._add_outside(sample_of(outside), raw[outside], faults)
        return np.array(raw, np.int64)

    def _look(self, present: pa.Array, rows: np.ndarray, faults: RowFaults) -> None:
        """Counts values of which none is known yet."""
        if self._num_unknown is None or self._vocabulary is None:
            return
        self._num_unknown += len(rows)
        if (rows != OUT_OF_VOCABULARY).any():
            self._num_unknown = None
        elif self._num_unknown >= LEAST_VALUES:
            values = [str(one) for one in present[:LOOKED_AT].unique().to_pylist()]
            lines = [self._vocabulary.line(at) for at in range(min(LOOKED_AT, self._vocabulary.num_values))]
            self._unknown = UnknownColumn(
                column=self.source.column,
                file=faults.origin.path,
                vocabulary=self._vocabulary.path,
                num_values=self._num_unknown,
                value=values[0],
                line=lines[0],
                cause=likely_cause(values, lines),
            )
            self._num_unknown = None


def _last_of(bags: Ragged, last: int, layouts: BagLayouts) -> Ragged:
    """The last ids of each bag with their weights; the same value if no bag has more."""
    lengths = np.diff(bags.row_splits)
    if not len(lengths) or lengths.max() <= last:
        return bags
    kept = np.minimum(lengths, last)
    splits = layouts.even(last) if lengths.min() >= last else _splits(kept)
    # The ends of a bag, before and after, are as far from each of its ids.
    at = np.arange(splits[-1]) + np.repeat(bags.row_splits[1:] - splits[1:], kept)
    return Ragged(bags.values[at], splits, None if bags.weights is None else bags.weights[at])


def hashed_rows(present: pa.Array, *, vocabulary_size: int, salt: int) -> np.ndarray:
    """int64 rows of integers or strings without nulls, as the mode `hash` makes them."""
    rows = _keys(plain(present))
    hash_in_place(rows, np.uint64(combine(salt) if salt else 0), vocabulary_size - 1)
    return rows


def vocabulary_rows(present: pa.Array, vocabulary: Vocabulary, *, num_reserved: int) -> np.ndarray:
    """int64 rows of integers or strings without nulls, as the mode `vocabulary` makes them.

    Raises:
      InputError: the values are integers and a line of the vocabulary is none.
    """
    present = plain(present)
    if not pa.types.is_integer(present.type):
        return vocabulary.rows_of_strings(present, num_reserved=num_reserved)
    return vocabulary.rows_of_integers(_keys(present), num_reserved=num_reserved)


def _keys(present: pa.Array) -> np.ndarray:
    """The integers themselves, int64, or 64 bits of each string."""
    if pa.types.is_integer(present.type):
        return np.array(present.to_numpy(zero_copy_only=False)).astype(np.int64)
    keys = np.empty(len(present), np.int64)
    string_keys(*text_of(present), keys)
    return keys


def key_of_text(text: str) -> int:
    """The key of a text where keys come and go."""
    return int(_keys(pa.array([text], pa.large_string()))[0])


def hashed_key(key: int, salt: int) -> int:
    """What the mode `hash` makes of a key where keys come and go."""
    keys = np.array([key], np.int64)
    mix_in_place(keys, np.uint64(combine(salt) if salt else 0))
    return int(keys[0])


def accepts(kind: pa.DataType, source: IdColumn) -> bool:
    """Whether a column of that type can become rows: integers always, strings by hash or vocabulary, any numbers with
    boundaries, lists of what is accepted.
    """
    if is_null(kind):
        return True
    if is_time(kind):
        return source.scale.accepts(kind)
    if source.boundaries:
        return source.scale == TimeScale() and is_numbers(kind)
    item = _item(kind)
    takes_text = source.mode != "as_is" or source.outside == "any"
    can_be = pa.types.is_integer(item) or is_null(item) or (is_text(item) and takes_text)
    return source.scale == TimeScale() and can_be


def is_null(kind: pa.DataType) -> bool:
    """Whether a column has no values, so that its writer knew no type."""
    return pa.types.is_null(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text, or lists of it."""
    item = _item(kind)
    return pa.types.is_string(item) or pa.types.is_large_string(item) or pa.types.is_string_view(item)


def _item(kind: pa.DataType) -> pa.DataType:
    """Type of the values, without lists and dictionaries."""
    item = kind.value_type if is_list(kind) else kind
    return item.value_type if pa.types.is_dictionary(item) else item


def is_numbers(kind: pa.DataType) -> bool:
    """Whether a column holds numbers, or lists of them."""
    item = kind.value_type if is_list(kind) else kind
    return pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item)


def kind_of(kind: pa.DataType, source: IdColumn) -> str:
    """What a column that is accepted holds, in words."""
    if is_time(kind):
        return words_of(kind)
    item = _item(kind)
    if is_null(item):
        return NULLS
    words = "numbers" if source.boundaries else "integers" if pa.types.is_integer(item) else "text"
    return f"lists of {words}" if is_list(kind) else words


def _values_of_part(column: pa.Array, part: IdColumn, faults: RowFaults) -> pa.Array:
    """What stands for the values of one column: integers or large strings, or lists of them."""
    if part.boundaries:
        return bucket_numbers(column, part, faults)
    if not is_time(column.type):
        return plain(column)
    whole, is_beyond = part.scale.whole(column)
    reason = "Ids are integers of 64 bits. Declare a larger unit or a later origin."
    faults.add(is_beyond, part.column, found=lambda row: shown(column[row]), reason=reason)
    return pa.array(whole, mask=null_mask(column))


def _taken_with_weights(bags: Ragged, order: np.ndarray, dtype: np.dtype) -> Ragged:
    """The bags `order`, with ids of a type."""
    offsets = frozen(bags.row_splits, np.int64)
    splits = np.empty(len(order) + 1, np.int64)
    take_splits(offsets, order, splits)
    values, weights = np.empty(int(splits[-1]), dtype), np.empty(int(splits[-1]), np.float32)
    take_bags(frozen(bags.values, dtype), offsets, order, splits, values)
    take_bags(frozen(np.asarray(bags.weights), np.float32), offsets, order, splits, weights)
    return Ragged(values, splits, weights)


def plain(column: pa.Array) -> pa.Array:
    """The same values with strings as large strings and without dictionaries."""
    kind = column.type
    item = kind.value_type if is_list(kind) else kind
    if pa.types.is_integer(item):
        return column
    value = item.value_type if pa.types.is_dictionary(item) else item
    value = value if pa.types.is_integer(value) else pa.large_string()
    return pc.cast(column, pa.large_list(value) if is_list(kind) else value)


def _without_empty(items: pa.Array) -> pa.Array:
    """Empty strings become nulls."""
    is_empty = pc.equal(pc.binary_length(items), 0)
    return pc.if_else(pc.fill_null(is_empty, True), pa.scalar(None, items.type), items)


def _offsets(column: pa.Array) -> np.ndarray:
    """Offsets of lists without nulls in their flattened values, int32 or int64."""
    if pa.types.is_fixed_size_list(column.type):
        return np.arange(len(column) + 1) * column.type.list_size
    offsets = column.offsets.to_numpy()
    return offsets - offsets[0] if offsets[0] else offsets


def _insert_zero_rows(bags: Ragged, where: np.ndarray) -> Ragged:
    """Gives the samples named by a mask, whose bags are empty, one id 0 each."""
    places = bags.row_splits[:-1][where]
    weights = None if bags.weights is None else np.insert(bags.weights, places, np.float32(1))
    return Ragged(np.insert(bags.values, places, 0), _splits(np.diff(bags.row_splits) + where), weights)


def _splits(lengths: np.ndarray) -> np.ndarray:
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return splits
