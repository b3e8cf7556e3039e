"""The Open Inference Protocol, version 2, over HTTP with binary tensors: requests become columns, outputs tensors.

Source: the protocol of KServe (`open-inference-protocol`), and Triton's extension for binary data. A column is a tensor
of its name, `[n]` or `[n, k]`; with one sample it counts for all. Lists of different lengths are two tensors, `tags`
with all values and `tags.row_splits` `[n + 1]`. Text is `BYTES`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from podembed.serving.artifact.exported_columns import ModelError, needed

ROW_SPLITS = ".row_splits"
HEADER_LENGTH = "inference-header-content-length"
_DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_HELD = {"integers": "INT64", "text": "BYTES", "times": "BYTES", "durations": "BYTES", "numbers": "FP32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """A request.

    Attributes:
      id: of the client's choosing, or None.
      columns: values by column.
      outputs: names of those to answer with, each with whether it is sent as bytes; empty for all.
      is_binary: whether outputs that are not named are sent as bytes.
    """

    id: str | None
    columns: dict[str, Any]
    outputs: dict[str, bool]
    is_binary: bool


def read_request(body: bytes, header_length: str | None) -> Inference:
    """Args:
      header_length: bytes of the JSON at the beginning of the body, as its header says; None where all is JSON.

    Raises:
      ModelError: the body is no request.
    """
    is_number = header_length is not None and header_length.isascii() and header_length.isdigit()
    length = len(body) if header_length is None else int(header_length[:12]) if is_number else -1
    if not 0 <= length <= len(body):
        raise ModelError(f"Found {HEADER_LENGTH} {header_length!r}. Expected 0 to {len(body)}. Send its real length.")
    document = parse_json(body[:length])
    if not isinstance(document, dict) or not isinstance(inputs := document.get("inputs"), list):
        raise ModelError("Found no list 'inputs'. Expected tensors by name. See /v2/models for the columns.")
    given: dict[str, Any] = {}
    rest = memoryview(body)[length:]
    for tensor in inputs:
        try:
            name, values, rest = _values(tensor, rest)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError, struct.error) as error:
            shown = tensor.get("name") if isinstance(tensor, dict) else tensor
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"Found tensor {shown!r:.80} that cannot be read ({error}). Expected name, datatype, shape, and data."
            ) from error
        given[name] = values
    if len(rest):
        raise ModelError(f"Found {len(rest)} bytes behind the tensors. Expected none. Send binary_data_size of each.")
    try:
        is_binary = bool((document.get("parameters") or {}).get("binary_data_output", False))
        outputs = {
            str(one["name"]): bool((one.get("parameters") or {}).get("binary_data", is_binary))
            for one in document.get("outputs") or []
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(
            f"Found 'outputs' or 'parameters' that cannot be read ({error}). Expected a list of objects with a name, "
            "and an object."
        ) from error
    return Inference(id=document.get("id"), columns=_columns(given), outputs=outputs, is_binary=is_binary)


def write_response(
    outputs: Mapping[str, np.ndarray], request: Inference, *, model: str, version: str
) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON where tensors follow as bytes.

    Raises:
      ModelError: there is no output of such a name.
    """
    wanted = request.outputs or dict.fromkeys(outputs, request.is_binary)
    described, parts = [], []
    for name, is_binary in wanted.items():
        if name not in outputs:
            raise ModelError(f"Found no output {name!r:.80}. Expected one of {sorted(outputs)}. Name one of these.")
        values = np.ascontiguousarray(outputs[name])
        if values.dtype not in _NAMES:
            values = values.astype(np.float32)
        tensor: dict[str, Any] = {"name": name, "datatype": _NAMES[values.dtype], "shape": list(values.shape)}
        if is_binary:
            parts.append(values.tobytes())
            tensor["parameters"] = {"binary_data_size": values.nbytes}
        else:
            tensor["data"] = values.reshape(-1)
        described.append(tensor)
    document: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": described}
    if request.id is not None:
        document["id"] = request.id
    header = to_json(document)
    return b"".join([header, *parts]), len(header) if parts else None


def metadata_of(manifest: Mapping[str, Any], *, name: str, versions: Sequence[str], bits: str) -> dict[str, Any]:
    """What the protocol says of a model: its tensors."""
    return {
        "name": name,
        "versions": list(versions),
        "platform": "podembed_jax",
        "inputs": inputs_of(manifest),
        "outputs": [
            {"name": output, "datatype": "FP32", "shape": [-1, *shape]} for output, shape in manifest["outputs"].items()
        ],
        "parameters": {"bits": bits},
    }


def inputs_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Name, datatype and shape of each column that a model reads."""
    kinds: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    for column in (*manifest["dense_columns"], *manifest["extra_columns"]):
        kinds[column["name"]] = _HELD.get(
            column["holds"] or "", "INT64" if "int" in column.get("dtype", "") else "FP32"
        )
        if column["size"] is not None:
            shapes[column["name"]] = [-1, -1 if column.get("kind") == "list" else column["size"]]
    for feature in manifest["features"]:
        for part in (feature, *feature["crossed_with"]):
            held = part["holds"] or ("numbers" if part["boundaries"] else "integers")
            kinds.setdefault(part["column"], _HELD.get(held, "INT64"))
        if feature["positions"]:
            shapes.setdefault(feature["column"], [-1, -1])
        if feature["weights"] is not None:
            kinds[feature["weights"]] = "FP32"
    return [{"name": name, "datatype": kinds[name], "shape": shapes.get(name, [-1])} for name in needed(manifest)]


def parse_json(data: bytes) -> Any:
    """Raises:
    ModelError: it is no JSON.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ModelError(
            f"Found no JSON ({error}). Expected an object. Send Content-Type: application/json."
        ) from error


def to_json(document: Any) -> bytes:
    """JSON of plain values and arrays of numbers."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _values(tensor: Mapping[str, Any], rest: memoryview) -> tuple[str, Any, memoryview]:
    """Name and values of a tensor, and the bytes behind its own."""
    name, datatype, shape = tensor["name"], tensor["datatype"], tensor["shape"]
    is_shape = isinstance(shape, list) and all(type(axis) is int and axis >= 0 for axis in shape)
    if not isinstance(name, str) or not is_shape or not 1 <= len(shape) <= 2:
        raise ValueError(f"shape {shape}; [n] or [n, k] expected")
    count = int(np.prod(shape))
    size_bytes = (tensor.get("parameters") or {}).get("binary_data_size")
    if size_bytes is None:
        flat = _flattened(tensor["data"])
        if datatype != "BYTES":
            flat = _exact(flat, _DTYPES[datatype])
    elif not 0 <= int(size_bytes) <= len(rest):
        raise ValueError(f"{size_bytes} bytes of data; {len(rest)} are left")
    else:
        data, rest = rest[: int(size_bytes)], rest[int(size_bytes) :]
        flat = _texts(data) if datatype == "BYTES" else np.frombuffer(data, _DTYPES[datatype])
    if len(flat) != count:
        raise ValueError(f"{len(flat)} values; {count} expected for shape {shape}")
    if len(shape) == 2 and shape[1] != 1:
        width = shape[1]
        flat = (
            flat.reshape(shape)
            if isinstance(flat, np.ndarray)
            else [flat[at : at + width] for at in range(0, count, width or 1)]
        )
    return name, flat, rest


def _exact(values: Sequence[Any], dtype: str) -> np.ndarray:
    """An array of numbers that the type holds."""
    found = np.array(values, dtype)
    if found.dtype.kind in "iu" and any(isinstance(value, float) for value in values):
        raise ValueError("fractions; integers expected")
    return found


def _flattened(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError("no list 'data'")
    return [value for one in data for value in one] if data and isinstance(data[0], list) else data


def _texts(data: memoryview) -> list[str]:
    """Texts, each behind its length of four bytes."""
    texts, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        if at + 4 + length > len(data):
            raise ValueError(f"a text of {length} bytes; {len(data) - at - 4} are left")
        texts.append(bytes(data[at + 4 : at + 4 + length]).decode())
        at += 4 + length
    return texts


def _columns(given: dict[str, Any]) -> dict[str, Any]:
    """The columns; those with row splits are lists of lists."""
    columns = {name: values for name, values in given.items() if not name.endswith(ROW_SPLITS)}
    for name, splits in given.items():
        if not name.endswith(ROW_SPLITS):
            continue
        column = name.removesuffix(ROW_SPLITS)
        values = columns.get(column)
        if values is None or not isinstance(splits, np.ndarray) or splits.ndim != 1 or splits.dtype.kind not in "iu":
            raise ModelError(f"Found {name!r:.80}. Expected integers [n + 1] beside a tensor {column!r:.80} of values.")
        at = splits.astype(np.int64)
        if not len(at) or at[0] != 0 or at[-1] != len(values) or (np.diff(at) < 0).any():
            raise ModelError(
                f"Found {name!r:.80} that does not rise from 0 to {len(values)}, the number of values. Expected where "
                "each sample's values begin."
            )
        columns[column] = [values[start:stop] for start, stop in zip(at[:-1].tolist(), at[1:].tolist(), strict=True)]
    return columns
