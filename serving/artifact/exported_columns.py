"""The values of columns as an exported model takes them: rows of tables, their weights, and dense numbers.

The arithmetic is that of `workers.columns`, in numpy alone. It becomes the first part of `served_model.py`, whose
second part is `exported_model`. So nothing here imports anything of podembed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from typing import Any

import numpy as np

_MASK = 0xFFFFFFFFFFFFFFFF
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_PERIODS = {"midnight": (86400, 0), "monday": (7 * 86400, 3 * 86400)}
_NUMBERS, _INTEGERS, _TEXT, _TIMES, _DURATIONS = "numbers", "integers", "text", "times", "durations"
# By the kind of an array, and of single values. A boolean is an int, and a number.
_KINDS = dict(zip("bfiuUSMm", (*[_NUMBERS] * 2, *[_INTEGERS] * 2, *[_TEXT] * 2, _TIMES, _DURATIONS), strict=True))
# A duration of numpy is an integer of numpy.
_CLASSES = {
    _NUMBERS: (bool, np.bool_, float, np.floating),
    _DURATIONS: (timedelta, np.timedelta64),
    _INTEGERS: (int, np.integer),
    _TEXT: (str, bytes),
    _TIMES: (date, np.datetime64),
}


class ModelError(ValueError):
    """An export that cannot be used, or columns that do not fit it."""


def columns_of(feature: Mapping[str, Any]) -> list[str]:
    """The columns that a feature is made of."""
    names = [part["column"] for part in (feature, *feature["crossed_with"])]
    return names if feature["weights"] is None else [*names, feature["weights"]]


def needed(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that an export reads, each once."""
    named = [column["name"] for column in (*manifest["dense_columns"], *manifest.get("extra_columns", ()))]
    named += [name for feature in manifest["features"] for name in columns_of(feature)]
    return tuple(dict.fromkeys(named))


def ids_of(
    columns: Mapping[str, Any], feature: Mapping[str, Any], vocabulary: ExportedVocabulary | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Rows of the table, or keys where these come and go, int64; the offsets of each sample's, and their weights."""
    plain = _plain_integers(columns[feature["column"]], feature)
    if plain is not None:
        return _rows(plain[0], feature, vocabulary), plain[1], None
    if feature["crossed_with"]:
        flat, is_missing, lengths = _crossed(columns, (feature, *feature["crossed_with"]))
    else:
        lists, lengths = _flat(columns[feature["column"]], feature["column"])
        flat, is_missing = _plain(lists, feature)
    rows = np.zeros(len(flat), np.int64)
    rows[~is_missing] = _rows(flat[~is_missing], feature, vocabulary)
    kept = np.ones(len(flat), bool) if feature["missing"] == "zero" else ~is_missing
    before = np.zeros(len(flat) + 1, np.int64)
    np.cumsum(kept, out=before[1:])
    weights = None if feature["weights"] is None else _weights(columns, feature, lengths, is_missing)[kept]
    rows, splits = rows[kept], before[splits_of(lengths)]
    # Exports from before there was a choice do not have the field.
    if feature.get("last") is None:
        return rows, splits, weights
    place = np.repeat(splits[1:], np.diff(splits)) - np.arange(len(rows))
    is_last = place <= feature["last"]
    splits = splits_of(np.minimum(np.diff(splits), feature["last"]))
    return rows[is_last], splits, None if weights is None else weights[is_last]


def _plain_integers(values: Any, feature: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """int64 of a list of integers, or of lists of them, none of them missing, and the offsets of each sample's, where a
    column is these alone: most columns, and most of the time that is spent on small requests. None of any other.
    """
    is_plain = feature.get("holds") == _INTEGERS and feature["weights"] is None and feature.get("last") is None
    if not is_plain or feature["crossed_with"] or feature["boundaries"] or _scaled(feature) or type(values) is not list:
        return None
    types = _types(values)
    if types == {list}:
        splits = splits_of(np.fromiter(map(len, values), np.int64, len(values)))
        values = list(chain.from_iterable(values))
        types = _types(values)
    else:
        splits = np.arange(len(values) + 1)
    if types != {int}:
        return None
    try:
        return np.array(values, np.int64), splits
    except OverflowError:
        return None  # Of 64 bits without a sign, or more.


def _scaled(column: Mapping[str, Any]) -> bool:
    return column["unit"] is not None or column["since"] is not None


def _rows(present: np.ndarray, feature: Mapping[str, Any], vocabulary: ExportedVocabulary | None) -> np.ndarray:
    mode, size = feature["mode"], feature["vocabulary_size"]
    if not len(present):
        return np.zeros(0, np.int64)
    if vocabulary is not None:
        return vocabulary.rows(present, feature["num_reserved"])
    has_keys = feature["invalid_ids"] == "any"
    if mode == "hash":
        offset = np.uint64(_mix_one(feature["salt"] & _MASK) if feature["salt"] else 0)
        if has_keys:
            return mix(_keys(present), offset).view(np.int64)
        return (mix(_keys(present), offset) % np.uint64(size - 1)).astype(np.int64) + 1
    if has_keys:
        return _keys(present).view(np.int64)
    if present.dtype == object:
        raise ModelError(f"Found text {present[0]!r} in column {feature['column']!r}. Expected integers.")
    outside = (present < 0) | (present >= size)
    if feature["invalid_ids"] == "error" and outside.any():
        found = present[outside][0]
        raise ModelError(f"Found id {found} in column {feature['column']!r}. Expected 0 to {size - 1}.")
    return present.astype(np.int64)


def _keys(present: np.ndarray) -> np.ndarray:
    """uint64 of integers or texts."""
    if present.dtype == object:
        return np.array([_string_key(text) for text in present], np.uint64)
    return present.astype(np.uint64)


def _crossed(
    columns: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys of all combinations of a sample's values, which are missing, and how many each sample has."""
    found = []
    for part in parts:
        lists, lengths = _flat(columns[part["column"]], part["column"])
        flat, is_missing = _plain(lists, part)
        keys = np.zeros(len(flat), np.uint64)
        keys[~is_missing] = _keys(flat[~is_missing])
        found.append((keys, is_missing, lengths))
    counts = np.prod([lengths for _, _, lengths in found], axis=0)
    splits = splits_of(counts)
    sample = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(int(splits[-1])) - splits[sample]
    items = []
    # The values of the last column run fastest.
    for _, _, lengths in reversed(found):
        items.append((np.cumsum(lengths) - lengths)[sample] + place % lengths[sample])
        place //= lengths[sample]
    folded = np.full(len(sample), _mix_one(len(parts)), np.uint64)
    missing = np.zeros(len(sample), bool)
    for (keys, is_missing, _), item in zip(found, reversed(items), strict=True):
        folded = mix(folded ^ keys[item], np.uint64(0))
        missing |= is_missing[item]
    return folded.view(np.int64), missing, counts


def _weights(
    columns: Mapping[str, Any], feature: Mapping[str, Any], lengths: np.ndarray, is_missing: np.ndarray
) -> np.ndarray:
    """float32, one for each id; 1 where the id is missing and has none."""
    name, ids, values = feature["weights"], columns[feature["column"]], columns[feature["weights"]]
    if _has_lists(ids) or _has_lists(values):
        # A missing list has no id, so it has no weight.
        extra = [_size(given) for one, given in zip(ids, values, strict=True) if one is None and _size(given)]
        if extra:
            raise ModelError(f"Found {extra[0]} weights in column {name!r} for 0 ids. Expected as many.")
    if not isinstance(values, np.ndarray):
        # A missing list and an empty one are the same beside each other.
        nothing = [[None] if one is None else [] for one in ids]
        values = [given if _size(given) else none for given, none in zip(values, nothing, strict=True)]
    lists, counts = _flat(values, name)
    other = np.flatnonzero(counts != lengths)
    if len(other):
        at = other[0]
        raise ModelError(f"Found {counts[at]} weights in column {name!r} for {lengths[at]} ids. Expected as many.")
    array = np.asarray(lists)
    if array.dtype == object:
        given = zip(array.tolist(), is_missing.tolist(), strict=True)
        array = np.asarray([1 if value is None and is_gap else value for value, is_gap in given])
    if array.dtype.kind not in "biuf" and len(array):
        raise ModelError(f"Found {array.dtype} in column {name!r}. Expected a number for each id.")
    with np.errstate(over="ignore"):
        weights = array.astype(np.float32)
    if not np.isfinite(weights).all():
        raise ModelError(f"Found {weights[~np.isfinite(weights)][0]} in column {name!r}. Expected finite numbers.")
    return weights


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _size(value: Any) -> int:
    return 0 if value is None else len(value) if _is_list(value) else 1


class ExportedVocabulary:
    """The values of a text file, one a line, made into tables when the first column of their kind asks.

    Attributes:
      lines: the values in their order.
    """

    def __init__(self, text: str) -> None:
        self.lines = text.removesuffix("\n").split("\n")
        self._places: dict[bool, dict[Any, int]] = {}

    def rows(self, present: np.ndarray, num_reserved: int) -> np.ndarray:
        is_text = present.dtype == object
        if is_text not in self._places:
            try:
                values = self.lines if is_text else [int(line) for line in self.lines]
            except ValueError as error:
                raise ModelError(
                    f"Found integers, such as {present[0]}, for a column whose vocabulary has text ({error}). Expected "
                    "text. Send text."
                ) from error
            self._places[is_text] = {value: at for at, value in enumerate(values)}
        places = self._places[is_text]
        found = np.array([places.get(value, -1) for value in present.tolist()], np.int64)
        return np.where(found < 0, 0, found + num_reserved)


def _flat(values: Any, name: str) -> tuple[Any, np.ndarray]:
    """All values one after another, and how many each sample has."""
    if isinstance(values, np.ndarray) and values.dtype != object and values.ndim <= 2:
        width = 1 if values.ndim == 1 else values.shape[1]
        return values.reshape(-1), np.full(len(values), width, np.int64)
    if not _has_lists(values):
        return values, np.ones(len(values), np.int64)
    # None in the place of a list is one missing value, as a null is; an empty list has none.
    is_plain = all(one is list for one in _types(values))
    lists = list(values) if is_plain else [value if _is_list(value) else [value] for value in values]
    return items_of(lists, name), np.fromiter(map(len, lists), np.int64, len(lists))


def _types(values: Any) -> set[type]:
    """The types of some values. Many values have few, so what is asked of each type is asked seldom."""
    return set(map(type, values))


def _has_lists(values: Any) -> bool:
    types = _types(values)
    return any(issubclass(one, (list, tuple)) for one in types) or (
        any(issubclass(one, np.ndarray) for one in types) and any(map(_is_list, values))
    )


def items_of(lists: Sequence[Any], name: str) -> list[Any]:
    """The items of all lists one after another."""
    items = list(chain.from_iterable(lists))
    if _has_lists(items):
        nested = next(item for item in items if _is_list(item))
        raise ModelError(
            f"Found a list in a list of column {name!r}: {nested!r:.80}. Expected one list of values for each sample. "
            "Join the inner lists."
        )
    return items


def _plain(values: Any, feature: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Integers, or objects that are texts, and which are missing. Numbers with boundaries are their buckets."""
    column = feature["column"]
    array = with_times(values, feature, column)
    if feature["boundaries"]:
        return _buckets(array, feature)
    if array.dtype.kind in "US" and not isinstance(values, np.ndarray) and _types(values) - {str, bytes}:
        # numpy makes texts of integers beside an empty text, which is a missing value.
        array = np.array([*values, None], object)[:-1]
    if array.dtype.kind in "OUS" or not len(array):
        items = [value.decode() if isinstance(value, bytes) else value for value in array.tolist()]
        is_missing = np.array([value is None or value == "" for value in items], bool)
        given = [value for value in items if value is not None and value != ""]
        if all(isinstance(value, str) for value in given):
            return np.array([value if value is not None else "" for value in items], object), is_missing
        given = _numbers(given)
        array = np.zeros(len(items), given.dtype)
        array[~is_missing] = given
    else:
        is_missing = np.zeros(len(array), bool)
        if array.dtype.kind == "f" and not isinstance(values, np.ndarray):
            array = _numbers(values)
    if array.dtype.kind in "mM":
        array, is_missing = whole_times(array, feature, column)
    # numpy makes 1 of True beside integers.
    is_typed = isinstance(values, np.ndarray) and values.dtype != object
    is_bool = not is_typed and array.dtype.kind in "iu" and bool(_types(values) & {bool, np.bool_})
    if array.dtype.kind not in "iu" or is_bool:
        found = "bool" if is_bool else array.dtype
        raise ModelError(f"Found {found} in column {column!r}. Expected integers, text or times, or lists.")
    return array.astype(np.int64), is_missing


def integers_of(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Integers, 0 where one is missing, and which are missing. Values of another type are as numpy has them."""
    array = np.asarray(values)
    is_missing = np.zeros(len(array), bool)
    if array.dtype == object:
        is_missing = np.array([value is None for value in array.tolist()], bool)
        given = _numbers([value for value in array.tolist() if value is not None])
        array = np.zeros(len(is_missing), given.dtype if len(given) else np.int64)
        array[~is_missing] = given
    elif not isinstance(values, np.ndarray):
        array = _numbers(values) if len(array) else np.zeros(0, np.int64)
    return array, is_missing


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """An array of them. Numpy makes floats of integers some of which are above 2^63 - 1; here they keep their bits."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" or not all(type(value) is int and -(1 << 63) <= value <= _MASK for value in values):
        return array
    return np.array([value & _MASK for value in values], np.uint64)


def _buckets(array: np.ndarray, part: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    is_missing = np.zeros(len(array), bool)
    if array.dtype == object:
        is_missing = np.array([value is None for value in array.tolist()], bool)
        array = np.asarray([0 if value is None else value for value in array.tolist()])
    if array.dtype.kind in "mM":
        is_missing = np.isnat(array)
        numbers = _times(np.where(is_missing, np.zeros((), array.dtype), array), part)
    elif array.dtype.kind in "biuf" or not len(array):
        numbers = array.astype(np.float64)
    else:
        raise ModelError(f"Found {array.dtype} in column {part['column']!r}. Expected numbers.")
    if np.isnan(numbers).any():
        raise ModelError(f"Found nan in column {part['column']!r}. Expected numbers; a missing one is None.")
    # Parts of crossed values have no mode.
    first = int(part.get("mode") == "as_is" and part["missing"] == "zero")
    return np.searchsorted(part["boundaries"], numbers, side="right") + first, is_missing


def dense_of(values: Any, column: Mapping[str, Any]) -> np.ndarray:
    """float32 `[n]`."""
    if type(values) is list and column.get("holds") == _NUMBERS and not _scaled(column) and _types(values) == {float}:
        array = np.array(values)
    else:
        array = with_times(values, column, column["name"])
    if array.dtype.kind in "mM":
        if np.isnat(array).any():
            raise ModelError(f"Found no time in column {column['name']!r}. Expected one a sample. Fill the column.")
        numbers = _times(array, column).astype(np.float32)
    else:
        numbers = _float32_of(array, column["name"])
    if column["transform"] == "log1p":
        numbers = np.log1p(np.maximum(numbers, np.float32(0)))
    return _finite(numbers, column["name"])


def finite_numbers(values: Any, name: str) -> np.ndarray:
    """float32 `[n]`, 0 where one is missing."""
    return _finite(_float32_of(np.asarray(values), name), name)


def _float32_of(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype == object:
        array = np.asarray([0 if value is None else value for value in array.tolist()])
    if array.dtype.kind not in "biuf" or array.ndim != 1:
        raise ModelError(f"Found {array.dtype}{list(array.shape)} in column {name!r}. Expected numbers, [n].")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _finite(numbers: np.ndarray, name: str) -> np.ndarray:
    if not np.isfinite(numbers).all():
        wrong = numbers[~np.isfinite(numbers)][0]
        raise ModelError(f"Found {wrong} in column {name!r}. Expected finite numbers; a missing one is None.")
    return numbers


def with_times(values: Any, column: Mapping[str, Any], name: str) -> np.ndarray:
    """The values, as times where the column is declared so, or had times in training. Text in ISO 8601 stands for a
    time in UTC.
    """
    # Exports from before kinds were recorded do not have the field.
    holds = column.get("holds")
    _check_kinds(values, holds, name, is_vocabulary=column.get("vocabulary") is not None)
    array = np.asarray(values)
    is_plain = column["unit"] is None and column["since"] is None and holds != _TIMES
    if is_plain or array.dtype.kind in "mM":
        return array
    if not all(value is None or isinstance(value, (str, date, np.datetime64)) for value in array.tolist()):
        raise ModelError(f"Found {array.dtype} in column {name!r}. Expected times: datetime64, or text in ISO 8601.")
    return np.array([_time(value) for value in array.tolist()], "datetime64[us]")


def _time(value: Any) -> Any:
    """A time in UTC without its zone, as numpy wants it. `NaT` of pandas, which is not equal to itself, is missing."""
    if not value or value != value:
        return "NaT"
    is_aware = isinstance(value, datetime) and value.tzinfo is not None
    return value.astimezone(UTC).replace(tzinfo=None) if is_aware else value


def _check_kinds(values: Any, holds: str | None, name: str, *, is_vocabulary: bool) -> None:
    """Compares values with those of training. Text among others would be the text of all of them.

    Args:
      holds: what the column had in training; None if that is not known.
    """
    found = _kinds_of(values)
    if _TEXT in found and len(found) > 1:
        both = " and ".join(repr(value) for value in found.values())
        raise ModelError(f"Found {both:.80} in column {name!r}. Expected values of one kind. A missing one is None.")
    alike = {_NUMBERS, _INTEGERS}
    accepted = {holds, *(alike if holds in alike else ()), *((_TEXT,) if holds == _TIMES else ())}
    if is_vocabulary and accepted & {_INTEGERS, _TEXT}:
        # Lines of a file are both.
        accepted |= {*alike, _TEXT}
    other = sorted(found.keys() - accepted)
    if holds is not None and other:
        form = ": datetime64, or text in ISO 8601" if holds == _TIMES else ""
        raise ModelError(
            f"Found {other[0]}, such as {found[other[0]]!r:.80}, in column {name!r}. Expected {holds}{form}, as the "
            f"model was trained with, since equal values of another kind become other rows or numbers. Send {holds}."
        )


def _kinds_of(values: Any) -> dict[str, Any]:
    """The kinds of those values that are not missing, each with one of its values."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        kind = _KINDS.get(values.dtype.kind, str(values.dtype))
        given = values[values.astype(bool)] if kind == _TEXT else values
        return {kind: given.flat[0]} if len(given) else {}
    kinds: dict[str, Any] = {}
    for one in _types(values) - {type(None)}:
        # An empty text is a missing value.
        is_text = issubclass(one, (str, bytes))
        value = next((value for value in values if type(value) is one and (value or not is_text)), None)
        if value is None:
            continue
        # Of an array without axes its type counts, as of a number.
        kind = _KINDS.get(getattr(getattr(value, "dtype", None), "kind", ""), one.__name__)
        kinds.setdefault(next((kind for kind, known in _CLASSES.items() if issubclass(one, known)), kind), value)
    return kinds


def _time_parts(array: np.ndarray, column: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, int, str]:
    """Whole seconds since the origin, what is left in parts of a second, how many these are, and the unit."""
    name, count = np.datetime_data(array.dtype)
    if name not in _A_SECOND or count != 1:
        name = "s" if name in "YMWDhm" else "ns"
        array = array.astype(f"{array.dtype.kind}8[{name}]")
    a_second = _A_SECOND[name]
    seconds, rest = np.divmod(array.view(np.int64), a_second)
    since = column["since"]
    if since in _PERIODS:
        period, shift = _PERIODS[since]
        seconds = (seconds % period + shift) % period
    elif since is not None:
        moment = datetime.fromisoformat(since)
        seconds = seconds - round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    return seconds, rest, a_second, column["unit"] or ("d" if array.dtype.kind == "M" else "s")


def _times(array: np.ndarray, column: Mapping[str, Any]) -> np.ndarray:
    seconds, rest, a_second, unit = _time_parts(array, column)
    if unit in _SECONDS:
        whole, over = np.divmod(seconds, _SECONDS[unit])
        return whole + (over + rest / a_second) / _SECONDS[unit]
    return seconds * float(_A_SECOND[unit]) + rest * (_A_SECOND[unit] / a_second)


def whole_times(array: np.ndarray, column: Mapping[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    """int64 of times, and which are missing."""
    is_missing = np.isnat(array)
    seconds, rest, a_second, unit = _time_parts(np.where(is_missing, np.zeros((), array.dtype), array), column)
    if unit in _SECONDS:
        return seconds // _SECONDS[unit], is_missing
    units = _A_SECOND[unit]
    is_beyond = (np.abs(seconds) > np.iinfo(np.int64).max // units - 1) & ~is_missing
    if is_beyond.any():
        raise ModelError(f"Found {array[is_beyond][0]} in column {name!r}. Expected times that 64 bits hold in {unit}.")
    return seconds * units + (
        rest * (units // a_second) if units >= a_second else rest // (a_second // units)
    ), is_missing


def mix(keys: np.ndarray, offset: np.uint64) -> np.ndarray:
    """SplitMix64, uint64."""
    with np.errstate(over="ignore"):
        word = (keys + np.uint64(_GAMMA)) ^ offset
        word = (word ^ (word >> np.uint64(30))) * np.uint64(_FIRST)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(_SECOND)
        return word ^ (word >> np.uint64(31))


def _mix_one(value: int) -> int:
    word = (value + _GAMMA) & _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def _string_key(text: str) -> int:
    data = text.encode()
    key = _mix_one(len(data))
    for start in range(0, len(data), 8):
        key = _mix_one(key ^ int.from_bytes(data[start : start + 8], "little"))
    return key


def splits_of(lengths: np.ndarray) -> np.ndarray:
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return splits
