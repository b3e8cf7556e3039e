"""`Event`: something that happened to a run, as a value with a kind and fields.

Names of fields carry their units: `_s` are seconds, `_bytes` bytes, `_unix_s` seconds since 1970. Without one a number
is a count, or the number of a step, a host or a generation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from typing import Any, ClassVar

MOST_TABLES = 3
"""So many are named in a sentence."""
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class Level(StrEnum):
    """How much an event matters to people who watch a run. An error costs what was done, or may."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """See the module. A type without a `kind` of its own takes the words of its name: `HostSlow` is `host_slow`.

    `flat` names a field whose own fields lie beside the others in `values`. `template` is the sentence of a type whose
    sentence only names fields.
    """

    kind: ClassVar[str] = "event"
    flat: ClassVar[str] = ""
    level: ClassVar[Level] = Level.INFO
    template: ClassVar[str]

    def __init_subclass__(cls, *, level: Level | None = None) -> None:
        if "kind" not in cls.__dict__:
            cls.kind = _WORD.sub("_", cls.__name__).lower()
        if level is not None:
            cls.level = level

    def sentence(self) -> str:
        """The event in plain English, for people: one line, as a rule."""
        return self.template.format(**{field.name: getattr(self, field.name) for field in fields(self)})

    def values(self) -> dict[str, Any]:
        """The fields as JSON has them; None where a number is not finite."""
        found = {name: _plain(value) for name, value in _fields(self)}
        return {**found.pop(self.flat, {}), **found}


# Takes events in the driver's thread, in the order in which they happen.
Emit = Callable[[Event], None]


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The fields that are shown; arrays are not."""
    return [(field.name, getattr(value, field.name)) for field in fields(value) if field.repr]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {name: _plain(inner) for name, inner in _fields(value)}
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
