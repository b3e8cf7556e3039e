"""What a user declares of a dynamic vocabulary: who gets a row, and who loses it when rows are full. Values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from podembed.embedding.kernels import vocabulary as kernels


def _at_least(name: str, value: object, least: int, meaning: str) -> int:
    """The same as an int of Python."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"Found {name}={value!r}. Expected an integer of at least {least}: {meaning}. Pass one.")
    return int(value)


@dataclass(frozen=True, slots=True)
class Always:
    """Every key gets a row in the step that names it first."""


@dataclass(frozen=True, slots=True)
class MinCount:
    """A key gets a row in the step in which it was named that often, all hosts and features of the table together.

    Attributes:
      count: occurrences, those of that step included.
    """

    count: int

    def __post_init__(self) -> None:
        count = _at_least("count", self.count, 1, "how often a key is named before it has a row")
        object.__setattr__(self, "count", count)


@dataclass(frozen=True, slots=True)
class Probability:
    """Every occurrence of a key gets it a row with this probability. The coin is a hash of the run's seed, the table,
    the key and the step, so it falls alike on any number of hosts.
    """

    probability: float

    def __post_init__(self) -> None:
        value = self.probability
        if not isinstance(value, int | float | np.number) or isinstance(value, bool) or not 0 < value <= 1:
            raise ValueError(f"Found probability={value!r}. Expected a number above 0, up to 1. Pass one such as 0.1.")
        object.__setattr__(self, "probability", float(value))


@dataclass(frozen=True, slots=True)
class Never:
    """Keys keep their rows. A new key that finds its bucket full is refused, until another one is forgotten."""


@dataclass(frozen=True, slots=True)
class LeastRecent:
    """The keys that were not named for longest are forgotten first."""


@dataclass(frozen=True, slots=True)
class LeastFrequent:
    """The keys that were named least often are forgotten first.

    Attributes:
      half_life: steps. A count is halved for every so many steps since its key was named last, so what was popular once
        does not stay for ever.
    """

    half_life: int

    def __post_init__(self) -> None:
        steps = _at_least("half_life", self.half_life, 1, "steps after which the count of an idle key is halved")
        object.__setattr__(self, "half_life", steps)


@dataclass(frozen=True, slots=True)
class SmallNorm:
    """The keys whose rows have the smallest Euclidean norm are forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyCounts:
    """What became of the keys of one table on one host in a window of steps.

    Attributes:
      num_keys: keys that have a row at its end.
      num_rows: rows that keys may have.
      admitted, evicted: keys that got a row, and that lost theirs.
      refused: keys that asked for a row and found none free, once a step.
      dropped: keys whose gradient of a step was dropped since they had no row.
      returned: of the admitted ones, those that lost their row before, no more than `forget_after` steps ago if there
        is one, as far as the host remembers.
      num_buckets, num_full: buckets held, and how many of them have no free row.
    """

    num_keys: int
    num_rows: int
    admitted: int = 0
    evicted: int = 0
    refused: int = 0
    dropped: int = 0
    returned: int = 0
    num_buckets: int = 0
    num_full: int = 0


Admit: TypeAlias = Always | MinCount | Probability
Evict: TypeAlias = Never | LeastRecent | LeastFrequent | SmallNorm

EVICTIONS = {
    Never: kernels.NEVER,
    LeastRecent: kernels.LEAST_RECENT,
    LeastFrequent: kernels.LEAST_FREQUENT,
    SmallNorm: kernels.SMALL_NORM,
}
DEFAULTS = ("first", "zeros", "shared")
