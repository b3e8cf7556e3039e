"""How many ids of a bag a device has room for: a power of two, by feature.

A room holds the longest bag of a step on any host. It is the same on all devices, and never becomes smaller within a
generation. Wherever it ends, numbers are the same, since the ids of a bag are summed one after another.
"""

from __future__ import annotations

_LAST_LEVEL = 10
MOST_IDS = 1 << _LAST_LEVEL
"""Of one bag of a table on devices."""


def level_for(longest: int) -> int:
    """The highest level that has room for so many ids. Level 0 has room for `MOST_IDS`."""
    return _LAST_LEVEL - (max(1, longest) - 1).bit_length()


def room_at(level: int) -> int:
    """Ids of a bag that a level has room for."""
    return 1 << (_LAST_LEVEL - level)


def first_levels(count: int) -> tuple[int, ...]:
    """Of so many features, room for one id each."""
    return (_LAST_LEVEL,) * count
