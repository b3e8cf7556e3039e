"""The probe of a version: made-up samples with the outputs that the version has for them, to the last bit.

A server scores them before it offers the version. They are drawn from the schema, so no user's data is in them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podembed.serving.artifact.exported_columns import columns_of
from podembed.workers.storage.strict_json import DocumentRefused

NUM_SAMPLES = 64

ProbeOutputs = Mapping[str, tuple[str, tuple[int, ...], bytes]]
_LONGEST = 5


def probe_columns(
    schema: Mapping[str, Any], *, vocabularies: Mapping[str, bytes], keys: Mapping[int, np.ndarray]
) -> dict[str, list[Any]]:
    """`NUM_SAMPLES` values of each column that a model reads, the same for the same arguments.

    Args:
      schema: fields of an export's manifest.
      vocabularies: texts, by their names in the schema.
      keys: by number of a table whose keys come and go, some that have a row.
    """
    random = np.random.Generator(np.random.Philox(0))
    columns: dict[str, list[Any]] = {}
    for feature in schema["features"]:
        for part in (feature, *feature["crossed_with"]):
            if part["column"] not in columns:
                lines = vocabularies[feature["vocabulary"]] if feature["vocabulary"] else b""
                has_lists = part is feature and bool(feature["positions"]) and not feature["crossed_with"]
                lengths = random.integers(1, _LONGEST, NUM_SAMPLES) if has_lists else None
                count = NUM_SAMPLES if lengths is None else int(lengths.sum())
                values = _ids(random, count, part, lines.decode().split("\n")[:1000], keys.get(feature["table"]))
                columns[part["column"]] = values if lengths is None else _lists(values, lengths)
        if feature["weights"] is not None:
            columns[feature["weights"]] = _weights(random, columns[columns_of(feature)[0]])
    for column in (*schema["dense_columns"], *schema["extra_columns"]):
        if column["name"] not in columns:
            columns[column["name"]] = _numbers(random, column)
    return columns


def encode_probe(columns: Mapping[str, Any], outputs: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a probe."""
    described = {
        name: {
            "dtype": str(values.dtype),
            "shape": list(values.shape),
            "data": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode(),
        }
        for name, values in outputs.items()
    }
    return json.dumps({"columns": columns, "outputs": described}, sort_keys=True).encode()


def decode_probe(data: bytes, name: str) -> tuple[dict[str, list[Any]], ProbeOutputs]:
    """The columns, and by output the type of its numbers, its shape and its bytes.

    Raises:
      DocumentRefused: the bytes are no probe.
    """
    try:
        document = json.loads(data)
        outputs = {
            one: (str(entry["dtype"]), tuple(map(int, entry["shape"])), base64.b64decode(entry["data"]))
            for one, entry in document["outputs"].items()
        }
        return {one: list(values) for one, values in document["columns"].items()}, outputs
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DocumentRefused(name, f"other content ({error})", "a probe") from error


def same_bits(found: Mapping[str, np.ndarray], expected: ProbeOutputs) -> bool:
    """Whether outputs are those of a probe to the last bit."""
    return found.keys() == expected.keys() and all(
        (str(values.dtype), values.shape, np.ascontiguousarray(values).tobytes()) == expected[name]
        for name, values in found.items()
    )


def _ids(
    random: np.random.Generator, count: int, part: Mapping[str, Any], lines: Sequence[str], keys: np.ndarray | None
) -> list[Any]:
    holds = part["holds"]
    if holds == "times":
        return _times(random, count)
    if part["boundaries"]:
        return random.normal(size=count).round(6).tolist()
    if part.get("mode") == "vocabulary":
        known = [line for line in lines if line]
        values = [known[at] for at in random.integers(0, len(known), count)]
        return [int(value) for value in values] if holds == "integers" else values
    if holds == "text":
        return [f"probe {number}" for number in random.integers(0, 1 << 30, count)]
    if keys is not None and len(keys):
        # Half of them have a row.
        own = random.integers(-(1 << 62), 1 << 62, count)
        return np.where(random.random(count) < 0.5, keys[random.integers(0, len(keys), count)], own).tolist()
    most = part["vocabulary_size"] if part.get("mode") == "as_is" else 1 << 40
    return random.integers(0, most, count).tolist()


def _numbers(random: np.random.Generator, column: Mapping[str, Any]) -> list[Any]:
    """Values of a dense or extra column."""
    size, kind = column.get("size"), column.get("kind", "number")
    lengths = None
    if size is not None:
        lengths = random.integers(0, size + 1, NUM_SAMPLES) if kind == "list" else np.full(NUM_SAMPLES, size)
    count = NUM_SAMPLES if lengths is None else int(lengths.sum())
    if column.get("holds") == "times" or column["since"] is not None or column["unit"] is not None:
        values: list[Any] = _times(random, count)
    elif column.get("dtype", "float32") != "float32" or kind == "integer":
        values = random.integers(0, 100, count).tolist()
    else:
        values = random.normal(size=count).round(6).tolist()
    return values if lengths is None else _lists(values, lengths)


def _weights(random: np.random.Generator, ids: Sequence[Any]) -> list[Any]:
    def some(count: int) -> list[float]:
        return random.random(count).round(6).tolist()

    return [some(len(one)) if isinstance(one, list) else some(1)[0] for one in ids]


def _times(random: np.random.Generator, count: int) -> list[str]:
    seconds = random.integers(0, 1 << 31, count).astype("datetime64[s]")
    return [str(moment) for moment in seconds]


def _lists(values: Sequence[Any], lengths: np.ndarray) -> list[list[Any]]:
    stops = np.cumsum(lengths)
    return [list(values[stop - length : stop]) for length, stop in zip(lengths.tolist(), stops.tolist(), strict=True)]
