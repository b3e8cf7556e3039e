"""`TracedSteps`: the steps that a trace is asked of, as text such as `20:25`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from podembed.orchestrator.api.configuration_error import ConfigurationError

_TEXT = re.compile(r"(\d{1,15}):(\d{1,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSteps:
    """Steps `first` to `last - 1`, counted from 0 as everywhere."""

    first: int
    last: int

    @staticmethod
    def parse(text: str) -> TracedSteps:
        """Raises:
        ConfigurationError: it is no range of steps, or an empty one.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ConfigurationError(
                f"Found trace={text!r}. Expected two steps, FIRST:LAST, of which the last is not traced any more. "
                "20:25 traces the five steps 20, 21, 22, 23 and 24."
            )
        first, last = int(found[1]), int(found[2])
        if first >= last:
            raise ConfigurationError(
                f"Found trace={text!r}, which holds no step. Expected a first step below the last one, which is not "
                f"traced any more. {first}:{first + 5} traces the five steps from {first} on."
            )
        return TracedSteps(first=first, last=last)

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"
