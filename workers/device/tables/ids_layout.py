"""`IdsLayout`: what a host tells its devices of the tables that they hold, as arrays of the memory that both share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from podembed.workers.job.on_devices.rooms import MOST_IDS, room_at

_ROWS, _WEIGHTS, _LEVELS, _RATES = "rows/", "row_weights/", "bag_levels/", "rates/"
_NO_RATES = np.zeros(0, np.float32)


class BagArrays(NamedTuple):
    """The ids of a feature: int32 `[num_bags, room]`, -1 where there is none; and float32 weights or None."""

    rows: np.ndarray
    weights: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsLayout:
    """The arrays of one batch, and the room for one bucket. Empty without tables on devices.

    Attributes:
      num_bags: by feature that looks up in such a table, those of a host with padding.
      weighted: of these features, those whose ids have weights.
      num_tables: how many there are.
      bucket_floats: the largest bucket of any, with its slots.
    """

    num_bags: Mapping[str, int] = field(default_factory=dict)
    weighted: frozenset[str] = frozenset()
    num_tables: int = 0
    bucket_floats: int = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name of an array. What no step writes takes no memory."""
        if not self.num_bags:
            return {}
        found: dict[str, tuple[int, ...]] = {_LEVELS: (len(self.num_bags),), _RATES: (self.num_tables,)}
        found |= {f"{_ROWS}{name}": (count * MOST_IDS,) for name, count in self.num_bags.items()}
        return found | {f"{_WEIGHTS}{name}": (self.num_bags[name] * MOST_IDS,) for name in sorted(self.weighted)}

    def dtypes(self) -> dict[str, str]:
        """Of the arrays that are not float32."""
        return {_LEVELS: "int32"} | {f"{_ROWS}{name}": "int32" for name in self.num_bags}

    def bags_in(self, arrays: Mapping[str, np.ndarray], levels: Sequence[int]) -> dict[str, BagArrays]:
        """By feature the ids of a batch, with the room of these levels."""
        found = {}
        for (name, count), level in zip(self.num_bags.items(), levels, strict=True):
            room = room_at(level)
            weights = arrays.get(f"{_WEIGHTS}{name}")
            found[name] = BagArrays(
                arrays[f"{_ROWS}{name}"][: count * room].reshape(count, room),
                None if weights is None else weights[: count * room].reshape(count, room),
            )
        return found

    def levels_in(self, arrays: Mapping[str, np.ndarray]) -> tuple[int, ...]:
        """By feature the level of its room in a batch."""
        return tuple(arrays[_LEVELS].tolist()) if self.num_bags else ()

    def say_levels(self, arrays: Mapping[str, np.ndarray], levels: Sequence[int]) -> None:
        """Writes what `levels_in` reads."""
        if self.num_bags:
            arrays[_LEVELS][:] = levels

    def rates_in(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32, the learning rate of each table on devices in a step."""
        return arrays.get(_RATES, _NO_RATES)
