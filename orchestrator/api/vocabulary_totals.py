"""What became of keys that come and go since the run began, table by table, as numbers that a commit keeps among its
counters. No clock, no Ray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from podembed.embedding.vocabulary.policies import VocabularyCounts

_PREFIX = "vocabulary"
# What a commit calls the fields of `VocabularyCounts`.
_NAMES = {
    "num_keys": "keys",
    "num_rows": "rows",
    "admitted": "admitted",
    "evicted": "evicted",
    "refused": "refused",
    "dropped": "dropped",
}


def totals_of(counters: Mapping[str, int], table: str) -> VocabularyCounts | None:
    """What a commit says of a table, of all hosts and since the run began; None where it says nothing."""
    found = {field: counters.get(f"{_PREFIX}/{table}/{name}") for field, name in _NAMES.items()}
    known = {field: number for field, number in found.items() if number is not None}
    return VocabularyCounts(**known) if len(known) == len(found) else None


def counters_of(totals: Mapping[str, VocabularyCounts]) -> dict[str, int]:
    """The same as counters of a commit.

    Args:
      totals: by name of the table.
    """
    return {
        f"{_PREFIX}/{table}/{name}": getattr(counts, field)
        for table, counts in totals.items()
        for field, name in _NAMES.items()
    }


class VocabularyTotals:
    """Adds up what hosts count. Mutated by the driver's thread.

    A commit has the totals of exactly its steps, since a generation begins with those of the commit that it starts
    from. So a run that was cut has the numbers of one that was not.
    """

    def __init__(self, tables: Sequence[str]) -> None:
        """
        Args:
          tables: names of all tables.
        """
        self._tables = tuple(tables)
        self._totals: dict[str, VocabularyCounts] = {}

    def begin(self, counters: Mapping[str, int]) -> None:
        """A generation starts from a commit with these; empty before the first one."""
        found = {table: totals_of(counters, table) for table in self._tables}
        self._totals = {table: totals for table, totals in found.items() if totals is not None}

    def take(self, hosts: Sequence[Mapping[str, VocabularyCounts]]) -> None:
        """Adds a window of steps.

        Args:
          hosts: what each host counted, by name of the table.
        """
        for table in self._tables:
            own = [counts[table] for counts in hosts if table in counts]
            if own:
                before = self._totals.get(table) or VocabularyCounts(num_keys=0, num_rows=0)
                self._totals[table] = _after(before, own)

    @property
    def counters(self) -> dict[str, int]:
        """What a commit keeps among its counters."""
        return counters_of(self._totals)


def _after(before: VocabularyCounts, hosts: Sequence[VocabularyCounts]) -> VocabularyCounts:
    sums = {field: sum(getattr(counts, field) for counts in hosts) for field in _NAMES}
    # Keys and rows are what there is, not what was added.
    since = {field: getattr(before, field) + sums[field] for field in _NAMES if not field.startswith("num_")}
    return dataclasses.replace(before, **sums | since)
