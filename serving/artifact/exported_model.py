"""`load` a model that `podembed export-model` wrote, and score with it. Needs numpy, jax and jax's own flatbuffers.

Behind the texts of `exported_columns`, `exported_extra` and `exported_program` this file lies in every export as
`served_model.py`. Beside these it imports nothing of podembed. docs/inference.md says what each file of an export
holds. Nothing is unpickled: arrays, text in JSON, and a program of JAX are all that there is.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from podembed.serving.artifact.exported_columns import (
    ExportedVocabulary,
    ModelError,
    columns_of,
    ids_of,
    mix,
    needed,
    splits_of,
)
from podembed.serving.artifact.exported_extra import dense_block, extra_of
from podembed.serving.predict.exported_program import FEWEST_SAMPLES, Program, padded_size

FORMAT = "podembed-model"
FORMAT_VERSION = 4
# Exports of version 2 have no extra columns, and those of version 3 no lists that keep their last items.
_READ_VERSIONS = (2, 3, FORMAT_VERSION)
_DTYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I32": "<i4", "I64": "<i8", "I16": "<i2", "I8": "i1"}
_DTYPES |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}

Bags = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def load(folder: str, *, reads_tables: bool = False) -> LoadedModel:
    """Opens an export in a folder of this machine. Tables are mapped, not read.

    Args:
      reads_tables: compare the checksums of tables, too, which reads all of them. Else their sizes are compared.

    Raises:
      ModelError: a file is missing or is not what was exported.
    """
    path = os.path.join(folder, "manifest.json")
    if not os.path.isfile(path):
        raise ModelError(f"Found no manifest.json in {folder}. Expected an export. Copy all of its files here.")
    manifest = _manifest(path)
    if manifest.get("format") != FORMAT or manifest.get("format_version") not in _READ_VERSIONS:
        raise ModelError(
            f"Found {manifest.get('format')} {manifest.get('format_version')} in {path}. Expected {FORMAT} "
            f"{' or '.join(map(str, _READ_VERSIONS))}. Load it with the served_model.py that lies beside it."
        )
    # Those of version 2 have no digest.
    if manifest["format_version"] != 2 and manifest.get("sha256") != manifest_digest(manifest):
        raise _altered(path)
    try:
        for name, expected in manifest["files"].items():
            _check(os.path.join(folder, name), expected, reads_all=reads_tables or not name.startswith("tables/"))
        names = {feature["vocabulary"] for feature in manifest["features"]} - {None}
        with open(os.path.join(folder, manifest["program"]), "rb") as file:
            program = file.read()
        return LoadedModel(
            manifest,
            program=program_of(program, manifest, path),
            dense=_safetensors(folder, "dense.safetensors"),
            tables=[
                np.load(os.path.join(folder, table["file"]), mmap_mode="r", allow_pickle=False)
                for table in manifest["tables"]
            ],
            vocabularies={name: ExportedVocabulary(_text(folder, name)) for name in names},
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise _altered(path) from error


def program_of(data: bytes, manifest: Mapping[str, Any], path: str) -> Program:
    """The program of an export.

    Args:
      data: as `jax.export` serialized it.
      path: path of the manifest, for messages.

    Raises:
      ModelError: this JAX is older than the one that wrote it, or cannot read it.
    """
    made_by = manifest.get("versions", {}).get("jax", "")
    # JAX reads programs of the half year before it. One of a later version ends in an error that says nothing of that.
    if _release(made_by) > _release(jax.__version__):
        raise ModelError(
            f"Found a program of jax {made_by} in {path}, under jax {jax.__version__}. Expected jax {made_by} or a "
            "later one, since an older one does not read it. Install it, or export the model with the older one."
        )
    try:
        return Program(jax.export.deserialize(bytearray(data)))
    except Exception as error:  # JAX raises many kinds, of XLA and of flatbuffers.
        text = str(error).split("\n", 1)[0]
        raise ModelError(
            f"Found a program of jax {made_by or 'an unknown version'} in {path} that jax {jax.__version__} cannot "
            f"read ({text:.200}). Expected a version at most half a year later. Export the model anew from its commit."
        ) from error


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _text(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8", newline="\n") as file:
        return file.read()


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the other fields of a manifest, as JSON with sorted keys and without spaces."""
    fields = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _manifest(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"Found no whole JSON in {path} ({error}). Expected a manifest. Copy it again.") from error
    if not isinstance(manifest, dict):
        raise _altered(path)
    return manifest


def _altered(path: str) -> ModelError:
    return ModelError(f"Found another manifest in {path} than was exported. Expected it unchanged. Copy it again.")


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


class Samples:
    """What a model reads of some samples. Whatever has one sample in the place of many counts for all of them.

    Attributes:
      num_samples: how many there are.
      inputs: dense numbers and extra columns by their names among the inputs of the program, `[n or 1, ...]`.
      bags: by feature its ids, int64, the offsets of each sample's, and their weights.
    """

    def __init__(self, num_samples: int, inputs: dict[str, np.ndarray], bags: list[Bags]) -> None:
        self.num_samples, self.inputs, self.bags = num_samples, inputs, bags


class LoadedModel:
    """An export in memory, as far as it is no table. Calls change nothing, from any thread.

    Args:
      program: as `program_of` has it.
      dense: the leaves of parameters and state, by their keys.
      tables: rows by their numbers.
      vocabularies: by their names in the manifest.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        *,
        program: Program,
        dense: Mapping[str, np.ndarray],
        tables: Sequence[Any],
        vocabularies: Mapping[str, ExportedVocabulary],
    ) -> None:
        self.manifest = manifest
        self._extra = manifest.get("extra_columns", [])
        self._tables = tables
        wide = [key for key, values in dense.items() if jax.dtypes.canonicalize_dtype(values.dtype) != values.dtype]
        if wide:
            raise ModelError(
                f"Found {wide[0]!r} as {dense[wide[0]].dtype}. Expected JAX to have 64 bits, as in training. Set "
                "JAX_ENABLE_X64=1 before Python starts."
            )
        self._dense = {key: jax.device_put(values) for key, values in dense.items()}
        self._program = program
        self._vocabularies = vocabularies

    @property
    def columns(self) -> list[str]:
        """The columns that are needed."""
        return list(needed(self.manifest))

    def predict(self, columns: Mapping[str, Any]) -> Any:
        """The scores, float32 `[n]`; a dictionary of them where the model has several.

        Args:
          columns: one value a sample, by column: arrays or lists. Ids of a bag are a list. None is a missing
            value.

        Raises:
          ModelError: a column is missing or holds what training refuses.
        """
        return scores_among(self.outputs(columns))

    def outputs(self, columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """All outputs of the model that belong to samples, by name `[n, ...]`."""
        samples = self.read(columns)
        batch_size = self.manifest["batch_size"]
        if min(batch_size, samples.num_samples) > FEWEST_SAMPLES:
            batch_size = min(batch_size, self.most_samples(padded_size(batch_size)))
        parts = []
        for start in range(0, samples.num_samples, batch_size):
            count = min(batch_size, samples.num_samples - start)
            size = padded_size(count)
            inputs = {}
            for name, values in samples.inputs.items():
                inputs[name] = np.zeros((size, *values.shape[1:]), values.dtype)
                inputs[name][:count] = values[start : start + count]
            for feature, bags in zip(self.manifest["features"], samples.bags, strict=True):
                inputs |= self.looked_up(feature, *_part(*bags, start, count, size))
            parts.append(self.run(inputs, count))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def read(self, columns: Mapping[str, Any], *, with_context: bool = False) -> Samples:
        """What the model reads of some columns, as `predict` takes them.

        Args:
          with_context: whether a column with one value counts for all samples.

        Raises:
          ModelError: as `predict`.
        """
        columns = self._given(columns, with_context=with_context)
        num_samples = max(map(len, columns.values()), default=0)
        try:
            inputs = {"dense": dense_block(columns, self.manifest["dense_columns"], num_samples)}
            for column in self._extra:
                inputs |= extra_of(columns[column["name"]], column)
            bags = [
                ids_of(_alike(columns, columns_of(feature)), feature, self._vocabularies.get(feature["vocabulary"]))
                for feature in self.manifest["features"]
            ]
        except ValueError as error:
            # numpy's own, of lists in lists and of text that is no time.
            raise ModelError(str(error)) from error
        return Samples(num_samples, inputs, bags)

    def run(self, inputs: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
        """The outputs of the first samples of a call of the program, which has `padded_size` of them."""
        return {name: values[:count] for name, values in self._program(self._dense, inputs).items()}

    def most_samples(self, most: int) -> int:
        """As `Program.most_samples`."""
        return self._program.most_samples(self._dense, most)

    def _given(self, columns: Mapping[str, Any], *, with_context: bool) -> dict[str, Any]:
        """The columns that are needed, as lists, tuples or arrays of one length, or of one value."""
        if not hasattr(columns, "keys"):
            raise ModelError(
                f"Found {type(columns).__name__} in the place of columns. Expected a mapping of {self.columns} to one "
                "value a sample. Pass lists or arrays by the names of the columns."
            )
        if missing := [name for name in self.columns if name not in columns]:
            raise ModelError(f"Found columns {list(columns)} without {missing}. Expected {self.columns}. Pass all.")
        given = {name: _values(columns[name], name) for name in self.columns}
        lengths = {name: len(values) for name, values in given.items()}
        different = {*lengths.values()} - ({1} if with_context else set())
        if len(different) > 1 or not min(lengths.values()):
            beside = ", or one value for all" if with_context else ""
            raise ModelError(
                f"Found columns of the lengths {lengths}. Expected one length of at least 1. Pass a value a sample"
                f"{beside}."
            )
        return given

    def looked_up(
        self, feature: Mapping[str, Any], ids: np.ndarray, splits: np.ndarray, weights: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """The activations of a feature, and the lengths of a sequence, by their names among the inputs."""
        found, num_samples, positions = {}, len(splits) - 1, feature["positions"]
        if feature["is_sequence"]:
            found[f"lengths/{feature['name']}"] = np.minimum(np.diff(splits), positions).astype(np.int32)
        if positions:
            ids, splits = _by_position(ids, splits, positions)
        pooled = self.pooled(feature, *_fitted(ids, splits, weights, feature))
        found[f"activations/{feature['name']}"] = pooled.reshape(num_samples, *feature["shape"])
        return found

    def pooled(
        self, feature: Mapping[str, Any], ids: np.ndarray, splits: np.ndarray, weights: np.ndarray | None
    ) -> np.ndarray:
        """float32 `[bags, width]`, of ids within the table."""
        return _pooled(self._tables[feature["table"]], ids, splits, weights, feature)


def scores_among(outputs: dict[str, np.ndarray]) -> Any:
    """The scores among all outputs, as `predict` has them."""
    for name in ("score", "scores"):
        if name in outputs:
            return outputs[name]
    return {name: values for name, values in outputs.items() if name.startswith("scores/")} or outputs


def _alike(columns: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Some columns, of one length."""
    found = {name: columns[name] for name in names}
    longest = max(map(len, found.values()))
    return {name: values if len(values) == longest else _repeated(values, longest) for name, values in found.items()}


def _repeated(values: Any, count: int) -> Any:
    return np.repeat(values, count, axis=0) if isinstance(values, np.ndarray) else [values[0]] * count


def _values(values: Any, name: str) -> Any:
    """A column as a list, a tuple or an array. Columns of frames and of tables are made arrays."""
    if isinstance(values, (list, tuple)):
        return values
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray)):
        return list(values)
    # Keys of a mapping, letters of a text and items of a set are no values of samples.
    if hasattr(values, "__array__") and np.ndim(made := np.asarray(values)):
        return made
    hint = " frame.to_dict('list') has them." if isinstance(values, Mapping) else ""
    raise ModelError(
        f"Found {type(values).__name__} in column {name!r}. Expected a list or an array with one value a sample.{hint}"
    )


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


def _part(ids: np.ndarray, splits: np.ndarray, weights: np.ndarray | None, start: int, count: int, size: int) -> Bags:
    """Some samples, and empty ones behind them up to `size`."""
    first, last = int(splits[start]), int(splits[start + count])
    cut = splits[start : start + count + 1] - first
    cut = np.concatenate([cut, np.full(size - count, last - first, np.int64)])
    return ids[first:last], cut, None if weights is None else weights[first:last]


def _by_position(ids: np.ndarray, splits: np.ndarray, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """One bag for each position; ids beyond the last one are left out."""
    sample = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
    position = np.arange(len(ids)) - splits[sample]
    kept = position < positions
    bag = sample[kept] * positions + position[kept]
    return ids[kept], splits_of(np.bincount(bag, minlength=(len(splits) - 1) * positions))


def _fitted(ids: np.ndarray, splits: np.ndarray, weights: np.ndarray | None, feature: Mapping[str, Any]) -> Bags:
    """Ids outside the table dropped, clipped or hashed, as it says."""
    size, rule = feature["vocabulary_size"], feature["invalid_ids"]
    outside = (ids < 0) | (ids >= size)
    if rule == "any" or not outside.any():
        return ids, splits, weights
    if rule == "drop":
        before = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(~outside, out=before[1:])
        return ids[~outside], before[splits], None if weights is None else weights[~outside]
    if rule == "clip":
        return np.clip(ids, 0, size - 1), splits, weights
    hashed = (mix(ids.astype(np.uint64), np.uint64(0)) % np.uint64(size)).astype(np.int64)
    return np.where(outside, hashed, ids), splits, weights


def _pooled(
    table: np.ndarray, ids: np.ndarray, splits: np.ndarray, weights: np.ndarray | None, feature: Mapping[str, Any]
) -> np.ndarray:
    """float32 `[bags, width]`. Sums run over a bag's ids in their order, as in training, which fixes the last bit."""
    counts = np.diff(splits)
    total = np.zeros((len(counts), table.shape[1]), np.float32)
    amounts = np.zeros(len(counts), np.float32)
    bags = np.flatnonzero(counts)
    for position in range(int(counts.max(initial=0))):
        bags = bags[counts[bags] > position]
        at = splits[bags] + position
        rows = _rounded(table[ids[at]], feature["quantization"])
        if weights is None:
            total[bags] += rows
            amounts[bags] += 1
        else:
            total[bags] += rows * weights[at][:, None]
            amounts[bags] += weights[at] ** 2 if feature["combiner"] == "sqrtn" else weights[at]
    if feature["combiner"] == "sum":
        return total
    amounts = np.sqrt(amounts) if feature["combiner"] == "sqrtn" else amounts
    return np.divide(total, amounts[:, None], out=np.zeros_like(total), where=amounts[:, None] != 0)


def _rounded(rows: np.ndarray, quantization: Mapping[str, Any] | None) -> np.ndarray:
    """Rows at the levels to which training rounds what it looks up."""
    if quantization is None:
        return rows
    lower, upper = np.float32(quantization["lower"]), np.float32(quantization["upper"])
    step = np.float32((quantization["upper"] - quantization["lower"]) / (quantization["num_buckets"] - 1))
    rows = np.clip(rows, lower, upper) - lower
    return np.floor(rows / step + np.float32(0.5)) * step + lower
