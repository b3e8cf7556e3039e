"""Flags that are given more than once: the parser would keep the last one and forget the others without a word.

Values of a flag that takes several are put together: `--set a=1 --set b=2` is `--set a=1 b=2`. A flag of one value is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_origin, get_type_hints


def gathered(arguments: Sequence[str], command: type) -> list[str]:
    """The arguments with each flag at most once. Those that repeat none stay as they are.

    Args:
      arguments: arguments of one command, without its name.
      command: the class whose fields are its flags.

    Raises:
      ConfigurationError: a flag of one value came twice.
    """
    from podembed.orchestrator.api.config import ConfigurationError

    kinds = {_flag(name): get_origin(kind) or kind for name, kind in get_type_hints(command).items()}
    others: list[str] = []
    flags: dict[str, list[str]] = {}
    taker, room, repeats = others, math.inf, False
    for argument in arguments:
        name, separator, value = argument.partition("=")
        flag = _flag(name.removeprefix("--"))
        if not argument.startswith("--") or flag not in kinds:
            if argument.startswith("--") or room < 1:
                taker, room = others, math.inf
            taker.append(argument)
            room -= 1
            continue
        kind, is_again = kinds[flag], flag in flags
        if is_again and kind not in (tuple, bool):
            raise ConfigurationError(f"Found {name} twice. Expected it once, since it has one value. Leave one out.")
        repeats = repeats or is_again
        taker = flags.setdefault(flag, [name])
        taker += [value] if separator else []
        room = 0 if separator or kind is bool else math.inf if kind is tuple else 1
    # Behind the others: a flag of several values would take them for its own.
    return [*others, *(part for group in flags.values() for part in group)] if repeats else [*arguments]


def _flag(name: str) -> str:
    return name.replace("_", "-")
