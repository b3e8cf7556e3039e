"""Totals of keys that come and go, over windows, hosts and generations."""

from __future__ import annotations

from podembed.embedding.vocabulary.policies import VocabularyCounts
from podembed.orchestrator.api.vocabulary_totals import VocabularyTotals, counters_of, totals_of


def counts(keys: int, **others: int) -> VocabularyCounts:
    return VocabularyCounts(num_keys=keys, num_rows=10, **others)


def test_windows_of_all_hosts_add_up_and_a_generation_begins_with_those_of_its_commit() -> None:
    totals = VocabularyTotals(["a/b", "static"])
    totals.begin({})
    assert totals.counters == {}
    totals.take([{"a/b": counts(3, admitted=3)}, {"a/b": counts(2, admitted=2, refused=1, dropped=4)}])
    committed = {"samples": 8, **totals.counters}
    assert totals_of(committed, "a/b") == VocabularyCounts(num_keys=5, num_rows=20, admitted=5, refused=1, dropped=4)
    assert totals_of(committed, "static") is None
    after = [{"a/b": counts(4, admitted=2, evicted=1)}, {"a/b": counts(2, dropped=1)}]
    totals.take(after)
    undisturbed = totals.counters
    # A fault takes the window back, and another generation makes it again.
    totals.begin(committed)
    totals.take(after)
    assert totals.counters == undisturbed
    assert totals_of(undisturbed, "a/b") == VocabularyCounts(
        num_keys=6, num_rows=20, admitted=7, evicted=1, refused=1, dropped=5
    )
    assert counters_of({"a/b": counts(1)})["vocabulary/a/b/keys"] == 1
