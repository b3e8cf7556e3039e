"""Frozen dataclasses to and from sealed JSON, strictly: every field must be there, no other may be, and each value has
its declared type.

Fields may be int, float, str, bool, other such dataclasses, `X | None`, `tuple[X, ...]` or `Sequence[X]`, and
`Mapping[str, X]`. What a value means (ranges, references, names) is checked by the module that owns the record.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from podembed.workers.storage.storage_errors import NotAPlainFile, WrongSize
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import MAX_DOCUMENT_BYTES, DocumentRefused, seal, unseal

Record = TypeVar("Record")


def read_document(store: Store, name: str, *, max_bytes: int) -> bytes:
    """The content of a document. One that is too large, or no file at all, is as damaged as one with other bytes.

    Raises:
      DocumentRefused: nothing was read; NameNotFound: it does not exist.
    """
    try:
        return store.read(name, max_bytes=max_bytes)
    except WrongSize as error:
        raise DocumentRefused(name, f"{error.found_bytes} bytes", f"at most {max_bytes}") from error
    except NotAPlainFile as error:
        raise DocumentRefused(name, error.found, "a plain file") from error


def encode(record: Any) -> bytes:
    """Sealed JSON of a frozen dataclass."""
    document = to_document(record)
    return seal(document)


def decode(cls: type[Record], name: str, data: bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Record:
    """The record that `encode` was given.

    Args:
      name: name of the file, for messages.

    Raises:
      DocumentRefused: the seal is broken, or the content is not exactly a `cls`.
    """
    return from_document(cls, name, unseal(name, data, max_bytes=max_bytes))


def to_document(value: Any) -> Any:
    """Plain JSON values of a record."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_document(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_document(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [to_document(inner) for inner in value]
    return value


def from_document(cls: type[Record], name: str, document: Any) -> Record:
    """A record from plain JSON values.

    Raises:
      DocumentRefused: naming the first member that is missing, unknown or of another type.
    """
    return _record(cls, name, cls.__name__, document)


@cache
def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _record(cls: type[Any], name: str, where: str, document: Any) -> Any:
    fields = _fields(cls)
    if not isinstance(document, dict):
        raise DocumentRefused(name, f"{_kind(document)} at {where}", "an object")
    if document.keys() != fields.keys():
        odd = ", ".join(sorted(map(str, document.keys() ^ fields.keys()))[:5])
        raise DocumentRefused(
            name, f"{where} with missing or unknown members: {odd[:200]}", f"exactly {', '.join(fields)}"
        )
    return cls(**{key: _value(fields[key], name, f"{where}.{key}", document[key]) for key in fields})


def _value(expected: Any, name: str, where: str, value: Any) -> Any:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is float and type(value) is int:
        return float(value)
    if expected in (int, float, str, bool):
        if type(value) is not expected:
            raise DocumentRefused(name, f"{_kind(value)} at {where}", expected.__name__)
        return value
    if origin in (types.UnionType, typing.Union):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _value(inner, name, where, value)
    if origin in (tuple, Sequence):
        if not isinstance(value, list):
            raise DocumentRefused(name, f"{_kind(value)} at {where}", "a list")
        return tuple(_value(arguments[0], name, f"{where}[]", inner) for inner in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise DocumentRefused(name, f"{_kind(value)} at {where}", "an object")
        return {key: _value(arguments[1], name, f"{where}.{key[:60]}", inner) for key, inner in value.items()}
    return _record(expected, name, where, value)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
