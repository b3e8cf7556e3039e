"""Commands and flags that do not exist: one sentence with what was probably meant, before the parser answers with a
screenful.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import get_type_hints

_OF_ALL = ("--help", "--version")
_FROM_COUNTS = "podembed plan estimates from what it counts, and needs no file of constants"
GONE = {
    "calibrate": f"It is gone: {_FROM_COUNTS}. ",
    "chaos --record": "It is gone: the last line that is printed has what was seen, as JSON. Leave it out. ",
    "plan --calibration": f"It is gone: {_FROM_COUNTS}. Leave it out. ",
    "plan --hosts-per-machine": "It is gone: bytes are counted as between machines. Leave it out. ",
    "plan --threads-per-host": "It is gone: the estimate is of one thread. Leave it out. ",
}
"""Commands and flags of older versions, with what to do instead."""
_LIKE = 0.6  # of difflib, from 0 to 1


def unknown_in(arguments: Sequence[str], kinds: Mapping[str, type]) -> str | None:
    """What is not known in a command line, as a sentence; None where the parser may have it.

    Args:
      arguments: arguments of the program.
      kinds: the class of each command, whose fields are its flags.
    """
    if not arguments:
        return None
    name = arguments[0]
    if name not in kinds:
        if name.startswith("-"):
            return None
        return f"Found the command {name!r}. {GONE.get(name) or _hint(name, kinds)}Expected one of {', '.join(kinds)}."
    flags = ["--" + field.replace("_", "-") for field in get_type_hints(kinds[name])]
    for argument in arguments[1:]:
        flag = argument.partition("=")[0].replace("_", "-")
        known = {*flags, *_OF_ALL, *(f"--no-{one[2:]}" for one in flags)}
        if len(flag) > 2 and flag.startswith("--") and flag not in known:
            hint = GONE.get(f"{name} {flag}") or _hint(flag, flags)
            return (
                f"Found {argument.partition('=')[0]}. {hint}Expected a flag of {name}: "
                f"podembed {name} --help lists them."
            )
    return None


def _hint(word: str, known: Sequence[str] | Mapping[str, type]) -> str:
    # Without the dashes, which all flags have alike.
    by_word = {one.removeprefix("--"): one for one in known}
    near = difflib.get_close_matches(word.removeprefix("--"), by_word, n=1, cutoff=_LIKE)
    return f"Did you mean {by_word[near[0]]}? " if near else ""
