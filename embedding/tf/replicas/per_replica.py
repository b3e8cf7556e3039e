"""`PerReplica`: one value for each replica of a strategy, and what one replica sees of a value that holds such ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podembed.embedding.tf.features.structures import is_nested


@dataclass(frozen=True, slots=True)
class PerReplica:
    """One value for each replica of a strategy, in the order of the replicas."""

    values: tuple[Any, ...]


def local_value(value: Any, replica: int) -> Any:
    """What one replica sees of a value: its own part of a `PerReplica`, also inside dicts, lists and tuples, otherwise
    the value.
    """
    if isinstance(value, PerReplica):
        return value.values[replica]
    if not is_nested(value):
        return value
    if isinstance(value, Mapping):
        return type(value)({key: local_value(child, replica) for key, child in value.items()})  # pyright: ignore[reportCallIssue]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(local_value(child, replica) for child in value))
    return type(value)([local_value(child, replica) for child in value])
