"""What a serialized configuration may not contain, and the error that says so with the table and the field.

Only general checks are here; which values of which field are supported is decided where the field is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet


class UnsupportedConfigField(ValueError):
    """A configuration says something that cannot be carried over.

    Attributes:
      table: name of the table, None for a field of the whole configuration.
      field: path of the field from the table or from the configuration down.
    """

    def __init__(self, table: str | None, field: str, problem: str) -> None:
        super().__init__(table, field, problem)
        self.table = table
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        place = "Configuration" if self.table is None else f"Table '{self.table}'"
        return f"{place}, field '{self.field}': {self.problem}"


def as_float32(value: Any, *, table: str, field: str) -> float:
    """The float32 nearest to `value`, which is what a message will hold.

    Raises:
      UnsupportedConfigField: not a number, or a finite one too large for float32.
    """
    try:
        exact = float("" if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        problem = f"Found {value!r}. Expected a number that fits in a float32. Pass a float."
        raise UnsupportedConfigField(table, field, problem) from None
    with np.errstate(over="ignore"):
        rounded = float(np.float32(exact))
    if np.isinf(rounded) and not np.isinf(exact):
        problem = f"Found {value!r}. Expected a number that fits in a float32. Choose one below 3.4e38."
        raise UnsupportedConfigField(table, field, problem)
    return rounded


def reject_unknown_fields(
    message: Any, *, table: str | None, path: str = "", without: frozenset[str] = frozenset()
) -> None:
    """Refuses a message that holds, at any depth, a field number which the schema does not know.

    Args:
      path: where the message is, ending in a dot.
      without: fields of the message that are not looked into.

    Raises:
      UnsupportedConfigField: with the number as the last part of the path.
    """
    for unknown in UnknownFieldSet(message):
        raise UnsupportedConfigField(
            table,
            f"{path}{unknown.field_number}",
            f"Found field number {unknown.field_number}, which is unknown here. Expected only fields of the schema. "
            "Remove it, or use a release that knows what it means.",
        )
    for field, value in message.ListFields():
        if field.message_type is not None and field.name not in without:
            for part in value if isinstance(value, Sequence) else (value,):
                reject_unknown_fields(part, table=table, path=f"{path}{field.name}.")


def reject_enum(
    message: Any, field: str, *, supported: tuple[str, ...], table: str | None, path: str = "", remedy: str
) -> None:
    """Refuses an enum field whose value is not among the `supported` names; a value without a name never is.

    Raises:
      UnsupportedConfigField: naming the field.
    """
    number = getattr(message, field)
    known = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(number)
    if known is not None and known.name in supported:
        return
    found = "an unknown value" if known is None else known.name
    raise UnsupportedConfigField(
        table, f"{path}{field}", f"Found {number} ({found}). Expected {' or '.join(supported)}. {remedy}"
    )
