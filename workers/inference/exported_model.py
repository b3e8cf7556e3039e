"""`load` a model that `podembed export-model` wrote, and score with it. Needs numpy, jax and jax's own flatbuffers.

This file lies in every export as `served_model.py`, and imports nothing of podembed. docs/inference.md says what each
file of an export holds. Nothing is unpickled: arrays, text in JSON, and a program of JAX are all that there is.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import jax
import jax.export
import numpy as np

FORMAT = "podembed-model"
FORMAT_VERSION = 1
_MASK = 0xFFFFFFFFFFFFFFFF
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_DTYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I32": "<i4", "I64": "<i8", "I16": "<i2", "I8": "i1"}
_DTYPES |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_PERIODS = {"midnight": (86400, 0), "monday": (7 * 86400, 3 * 86400)}


class ModelError(ValueError):
    """An export that cannot be used, or columns that do not fit it."""


def load(folder: str, *, reads_tables: bool = False) -> Model:
    """Opens an export in a folder of this machine. Tables are mapped, not read.

    Args:
      reads_tables: compare the checksums of tables, too, which reads all of them. Else their sizes are compared.

    Raises:
      ModelError: a file is missing or is not what was exported.
    """
    path = os.path.join(folder, "manifest.json")
    if not os.path.isfile(path):
        raise ModelError(f"Found no manifest.json in {folder}. Expected an export. Copy all of its files here.")
    with open(path, encoding="utf-8") as file:
        manifest = json.load(file)
    if manifest.get("format") != FORMAT or manifest.get("format_version") != FORMAT_VERSION:
        raise ModelError(
            f"Found {manifest.get('format')} {manifest.get('format_version')} in {path}. Expected {FORMAT} "
            f"{FORMAT_VERSION}. Load it with the served_model.py that lies beside it."
        )
    for name, expected in manifest["files"].items():
        _check(os.path.join(folder, name), expected, reads_all=reads_tables or not name.startswith("tables/"))
    return Model(folder, manifest)


def _check(path: str, expected: Mapping[str, Any], *, reads_all: bool) -> None:
    size_bytes = expected["size_bytes"]
    found = f"{os.path.getsize(path)} bytes" if os.path.isfile(path) else "no file"
    if found != f"{size_bytes} bytes":
        raise ModelError(f"Found {found} at {path}. Expected {size_bytes} bytes. Copy the export again.")
    if reads_all:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
        if digest.hexdigest() != expected["sha256"]:
            raise ModelError(f"Found other bytes in {path}. Expected those that were exported. Copy it again.")


class Model:
    """An export in memory, as far as it is no table. Calls change nothing, from any thread."""

    def __init__(self, folder: str, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        files = [os.path.join(folder, table["file"]) for table in manifest["tables"]]
        self._tables = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
        self._dense = {key: jax.device_put(values) for key, values in _safetensors(folder, "dense.safetensors").items()}
        with open(os.path.join(folder, manifest["program"]), "rb") as file:
            self._program = jax.jit(jax.export.deserialize(bytearray(file.read())).call)
        names = {feature["vocabulary"] for feature in manifest["features"]} - {None}
        self._vocabularies = {name: _Vocabulary(os.path.join(folder, name)) for name in names}

    @property
    def columns(self) -> list[str]:
        """The columns that are needed."""
        named = [column["name"] for column in self.manifest["dense_columns"]]
        return list(dict.fromkeys([*named, *(feature["column"] for feature in self.manifest["features"])]))

    def predict(self, columns: Mapping[str, Any]) -> Any:
        """The scores, float32 `[n]`; a dictionary of them where the model has several.

        Args:
          columns: by name one value a sample: arrays or lists. Ids of a bag are a list. None is a missing value.

        Raises:
          ModelError: a column is missing or holds what training refuses.
        """
        outputs = self.outputs(columns)
        for name in ("score", "scores"):
            if name in outputs:
                return outputs[name]
        return {name: values for name, values in outputs.items() if name.startswith("scores/")} or outputs

    def outputs(self, columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """All outputs of the model that belong to samples, by name `[n, ...]`."""
        num_samples = self._num_samples(columns)
        try:
            dense = [_dense(columns[column["name"]], column) for column in self.manifest["dense_columns"]]
            features = [self._ids(columns[feature["column"]], feature) for feature in self.manifest["features"]]
        except ValueError as error:
            # numpy's own, of lists in lists and of text that is no time.
            raise ModelError(str(error)) from error
        batch_size = self.manifest["batch_size"]
        parts = []
        for start in range(0, num_samples, batch_size):
            count = min(batch_size, num_samples - start)
            # As many samples as `podembed predict` takes at once, since the last bit of a score may depend on it.
            size = min(batch_size, 1 << max(0, count - 1).bit_length())
            inputs = {"dense": np.zeros((size, len(dense)), np.float32)}
            for at, column in enumerate(dense):
                inputs["dense"][:count, at] = column[start : start + count]
            for feature, bags in zip(self.manifest["features"], features, strict=True):
                inputs |= self._looked_up(feature, *_part(*bags, start, count, size))
            parts.append({name: np.asarray(v)[:count] for name, v in self._program(self._dense, inputs).items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _num_samples(self, columns: Mapping[str, Any]) -> int:
        if missing := [name for name in self.columns if name not in columns]:
            raise ModelError(f"Found columns {sorted(columns)} without {missing}. Expected {self.columns}. Pass all.")
        lengths = {name: len(columns[name]) if hasattr(columns[name], "__len__") else 0 for name in self.columns}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            raise ModelError(
                f"Found columns of the lengths {lengths}. Expected one length of at least 1. Pass a value a sample."
            )
        return next(iter(lengths.values()))

    def _ids(self, values: Any, feature: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the table, int64, and the offsets of each sample's."""
        lists, lengths = _flat(values)
        flat, is_missing = _plain(lists, feature)
        rows = np.zeros(len(flat), np.int64)
        present = flat[~is_missing]
        rows[~is_missing] = self._rows(present, feature)
        kept = np.ones(len(flat), bool) if feature["missing"] == "zero" else ~is_missing
        before = np.zeros(len(flat) + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        return rows[kept], before[_splits(lengths)]

    def _rows(self, present: np.ndarray, feature: Mapping[str, Any]) -> np.ndarray:
        mode, size = feature["mode"], feature["vocabulary_size"]
        if not len(present):
            return np.zeros(0, np.int64)
        if mode == "vocabulary":
            return self._vocabularies[feature["vocabulary"]].rows(present, feature["num_reserved"])
        if mode == "hash":
            keys = present if present.dtype != object else np.array([_string_key(text) for text in present], np.uint64)
            offset = np.uint64(_mix_one(feature["salt"] & _MASK) if feature["salt"] else 0)
            return (_mix(keys.astype(np.uint64), offset) % np.uint64(size - 1)).astype(np.int64) + 1
        if present.dtype == object:
            raise ModelError(f"Found text {present[0]!r} in column {feature['column']!r}. Expected integers.")
        outside = (present < 0) | (present >= size)
        if feature["invalid_ids"] == "error" and outside.any():
            found = present[outside][0]
            raise ModelError(f"Found id {found} in column {feature['column']!r}. Expected 0 to {size - 1}.")
        return present.astype(np.int64)

    def _looked_up(self, feature: Mapping[str, Any], ids: np.ndarray, splits: np.ndarray) -> dict[str, np.ndarray]:
        """The activations of a feature, and the lengths of a sequence."""
        found, num_samples, positions = {}, len(splits) - 1, feature["positions"]
        if feature["is_sequence"]:
            found[f"lengths/{feature['name']}"] = np.minimum(np.diff(splits), positions).astype(np.int32)
        if positions:
            ids, splits = _by_position(ids, splits, positions)
        pooled = _pooled(self._tables[feature["table"]], *_fitted(ids, splits, feature), feature)
        found[f"activations/{feature['name']}"] = pooled.reshape(num_samples, *feature["shape"])
        return found


def _safetensors(folder: str, name: str) -> dict[str, np.ndarray]:
    with open(os.path.join(folder, name), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        arrays = {}
        for key, entry in header.items():
            start, stop = (8 + length + at for at in entry["data_offsets"])
            dtype = jax.numpy.bfloat16 if entry["dtype"] == "BF16" else np.dtype(_DTYPES[entry["dtype"]])
            arrays[key] = np.frombuffer(data[start:stop], dtype).reshape(entry["shape"])
        return arrays


class _Vocabulary:
    """The values of a text file, one a line, made into tables when the first column of their kind asks."""

    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8", newline="\n") as file:
            self._lines = file.read().removesuffix("\n").split("\n")
        self._places: dict[bool, dict[Any, int]] = {}

    def rows(self, present: np.ndarray, num_reserved: int) -> np.ndarray:
        is_text = present.dtype == object
        if is_text not in self._places:
            values = self._lines if is_text else map(int, self._lines)
            self._places[is_text] = {value: at for at, value in enumerate(values)}
        places = self._places[is_text]
        found = np.array([places.get(value, -1) for value in present.tolist()], np.int64)
        return np.where(found < 0, 0, found + num_reserved)


def _flat(values: Any) -> tuple[Any, np.ndarray]:
    """All values one after another, and how many each sample has."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        width = 1 if values.ndim == 1 else values.shape[1]
        return values.reshape(-1), np.full(len(values), width, np.int64)
    if not any(isinstance(value, (list, tuple, np.ndarray)) for value in values):
        return values, np.ones(len(values), np.int64)
    # None in the place of a list is one missing value, as a null is; an empty list has none.
    lists = [value if isinstance(value, (list, tuple, np.ndarray)) else [value] for value in values]
    return [item for one in lists for item in one], np.array([len(one) for one in lists], np.int64)


def _plain(values: Any, feature: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Integers, or objects that are texts, and which are missing."""
    column = feature["column"]
    array = _with_times(values, feature, column)
    if array.dtype.kind in "OUS" or not len(array):
        items = [value.decode() if isinstance(value, bytes) else value for value in array.tolist()]
        is_missing = np.array([value is None or value == "" for value in items], bool)
        given = [value for value in items if value is not None and value != ""]
        if all(isinstance(value, str) for value in given):
            return np.array([value if value is not None else "" for value in items], object), is_missing
        given = np.asarray(given)
        array = np.zeros(len(items), given.dtype)
        array[~is_missing] = given
    else:
        is_missing = np.zeros(len(array), bool)
    if array.dtype.kind in "mM":
        is_missing |= np.isnat(array)
        array = _whole_times(np.where(is_missing, np.zeros((), array.dtype), array), feature)
    if array.dtype.kind not in "iu":
        raise ModelError(f"Found {array.dtype} in column {column!r}. Expected integers, text or times, or lists.")
    return array.astype(np.int64), is_missing


def _dense(values: Any, column: Mapping[str, Any]) -> np.ndarray:
    """float32 `[n]`."""
    array = _with_times(values, column, column["name"])
    if array.dtype == object:
        array = np.asarray([0 if value is None else value for value in array.tolist()])
    if array.dtype.kind in "mM":
        if np.isnat(array).any():
            raise ModelError(f"Found no time in column {column['name']!r}. Expected one a sample. Fill the column.")
        numbers = _times(array, column).astype(np.float32)
    elif array.dtype.kind in "biuf" and array.ndim == 1:
        with np.errstate(over="ignore"):
            numbers = array.astype(np.float32)
    else:
        raise ModelError(f"Found {array.dtype}{list(array.shape)} in column {column['name']!r}. Expected numbers, [n].")
    if column["transform"] == "log1p":
        numbers = np.log1p(np.maximum(numbers, np.float32(0)))
    if not np.isfinite(numbers).all():
        wrong = numbers[~np.isfinite(numbers)][0]
        raise ModelError(f"Found {wrong} in column {column['name']!r}. Expected finite numbers; a missing one is None.")
    return numbers


def _with_times(values: Any, column: Mapping[str, Any], name: str) -> np.ndarray:
    """The values, as times where the column is declared so. Text in ISO 8601 stands for a time in UTC."""
    array = np.asarray(values)
    if (column["unit"] is None and column["since"] is None) or array.dtype.kind in "mM":
        return array
    if not all(value is None or isinstance(value, str) for value in array.tolist()):
        raise ModelError(f"Found {array.dtype} in column {name!r}. Expected times: datetime64, or text in ISO 8601.")
    return np.array([value or "NaT" for value in array.tolist()], "datetime64[us]")


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


def _whole_times(array: np.ndarray, column: Mapping[str, Any]) -> np.ndarray:
    seconds, rest, a_second, unit = _time_parts(array, column)
    if unit in _SECONDS:
        return seconds // _SECONDS[unit]
    units = _A_SECOND[unit]
    return seconds * units + (rest * (units // a_second) if units >= a_second else rest // (a_second // units))


def _mix(keys: np.ndarray, offset: np.uint64) -> np.ndarray:
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


def _splits(lengths: np.ndarray) -> np.ndarray:
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return splits


def _part(ids: np.ndarray, splits: np.ndarray, start: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Some samples, and empty ones behind them up to `size`."""
    first, last = int(splits[start]), int(splits[start + count])
    cut = splits[start : start + count + 1] - first
    return ids[first:last], np.concatenate([cut, np.full(size - count, last - first, np.int64)])


def _by_position(ids: np.ndarray, splits: np.ndarray, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """One bag for each position; ids beyond the last one are left out."""
    sample = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
    position = np.arange(len(ids)) - splits[sample]
    kept = position < positions
    bag = sample[kept] * positions + position[kept]
    return ids[kept], _splits(np.bincount(bag, minlength=(len(splits) - 1) * positions))


def _fitted(ids: np.ndarray, splits: np.ndarray, feature: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Ids outside the table dropped, clipped or hashed, as it says."""
    size, rule = feature["vocabulary_size"], feature["invalid_ids"]
    outside = (ids < 0) | (ids >= size)
    if not outside.any():
        return ids, splits
    if rule == "drop":
        before = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(~outside, out=before[1:])
        return ids[~outside], before[splits]
    if rule == "clip":
        return np.clip(ids, 0, size - 1), splits
    hashed = (_mix(ids.astype(np.uint64), np.uint64(0)) % np.uint64(size)).astype(np.int64)
    return np.where(outside, hashed, ids), splits


def _pooled(table: np.ndarray, ids: np.ndarray, splits: np.ndarray, feature: Mapping[str, Any]) -> np.ndarray:
    """float32 `[bags, width]`. Sums run over a bag's ids in their order, as in training, which fixes the last bit."""
    counts = np.diff(splits)
    total = np.zeros((len(counts), table.shape[1]), np.float32)
    bags = np.flatnonzero(counts)
    for position in range(int(counts.max(initial=0))):
        bags = bags[counts[bags] > position]
        total[bags] += _rounded(table[ids[splits[bags] + position]], feature["quantization"])
    if feature["combiner"] == "sum":
        return total
    amounts = counts.astype(np.float32)
    amounts = np.sqrt(amounts) if feature["combiner"] == "sqrtn" else amounts
    return np.divide(total, amounts[:, None], out=np.zeros_like(total), where=counts[:, None] > 0)


def _rounded(rows: np.ndarray, quantization: Mapping[str, Any] | None) -> np.ndarray:
    """Rows at the levels to which training rounds what it looks up."""
    if quantization is None:
        return rows
    lower, upper = np.float32(quantization["lower"]), np.float32(quantization["upper"])
    step = np.float32((quantization["upper"] - quantization["lower"]) / (quantization["num_buckets"] - 1))
    rows = np.clip(rows, lower, upper) - lower
    return np.floor(rows / step + np.float32(0.5)) * step + lower
