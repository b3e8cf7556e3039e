"""What is told of a run's windows: things that last, once, and again when they change; and the deadlines that follow
from step times.
"""

from __future__ import annotations

from dataclasses import replace

from podembed.embedding.vocabulary.policies import VocabularyCounts
from podembed.orchestrator.api.config import FailureConfig
from podembed.orchestrator.decisions.window_health import WINDOWS, WindowHealth
from podembed.workers.host.spec import HostWindow
from podembed.workers.liveness.progress import Phase
from tests.sentences import sentences


def window(phase_s: dict[str, float], *rows: int) -> HostWindow:
    return HostWindow(
        num_samples=10,
        phase_s={Phase(text): seconds for text, seconds in phase_s.items()},
        bytes_sent=0,
        rows_asked=rows or (0, 0),
    )


EVEN_S = {"read": 0.5, "device": 1.0}
EVEN = window(EVEN_S)
READS_SLOWLY = window({"read": 1.4, "device": 0.1})
UPDATES_SLOWLY = window({"read": 0.5, "update": 0.9})
LIMPS = window({"read": 0.8, "device": 0.7})


def health(config: FailureConfig | None = None) -> WindowHealth:
    return WindowHealth.of(config or FailureConfig(), ["users", "items"], invalid_ids=["hash", "drop"], emit=print)


def told(seen: WindowHealth, hosts: list[HostWindow], times: int = 1) -> list[str]:
    return [text for _ in range(times) for text in sentences(seen.window(hosts, seconds=2.0, num_steps=10))]


def test_a_slow_host_is_told_once_when_it_lasts_and_again_when_it_is_over() -> None:
    seen = health()
    assert told(seen, [EVEN, READS_SLOWLY], WINDOWS - 1) == []
    (text,) = told(seen, [EVEN, READS_SLOWLY])
    assert text.startswith("host 1 is slow: 2.8 times")
    assert "in read" in text
    assert told(seen, [EVEN, READS_SLOWLY], 20) == []
    assert told(seen, [EVEN, EVEN], WINDOWS - 1) == []
    assert told(seen, [EVEN, EVEN]) == ["host 1 keeps up with the others again"]
    assert told(seen, [EVEN, EVEN], 20) == []
    assert seen.slowest == 1.0


def test_ids_outside_a_vocabulary_are_told_once_a_table() -> None:
    def altered(*counts: int) -> HostWindow:
        return replace(EVEN, altered_ids=counts)

    seen = health()
    assert told(seen, [altered(0, 0), altered(0, 0)]) == []
    (text,) = told(seen, [altered(0, 1200), altered(0, 34)])
    assert text.startswith("1,234 ids outside the vocabulary of table 'items'")
    assert told(seen, [altered(0, 5), altered(0, 6)]) == []
    (text,) = told(seen, [altered(1, 5), altered(0, 6)])
    assert text.startswith("1 ids outside the vocabulary of table 'users'")


def test_another_phase_is_told_anew() -> None:
    seen = health()
    told(seen, [EVEN, READS_SLOWLY], WINDOWS)
    (text,) = told(seen, [EVEN, UPDATES_SLOWLY], WINDOWS)
    assert "in update" in text


def test_a_host_that_is_slow_in_one_phase_and_then_another_is_told() -> None:
    """Whatever takes its processors slows every phase; which one loses the most is chance."""
    seen = health()
    turns = [*[[EVEN, READS_SLOWLY], [EVEN, UPDATES_SLOWLY]] * 10]
    (text,) = [text for hosts in turns for text in told(seen, hosts)]
    assert text.startswith("host 1 is slow")
    assert told(seen, [EVEN, EVEN], WINDOWS) == ["host 1 keeps up with the others again"]


def test_a_single_slow_window_and_one_in_turns_are_noise() -> None:
    seen = health()
    for _ in range(10):
        assert told(seen, [EVEN, READS_SLOWLY]) == []
        assert told(seen, [READS_SLOWLY, EVEN]) == []


def test_between_slow_and_well_nothing_changes() -> None:
    seen = health()
    told(seen, [EVEN, READS_SLOWLY], WINDOWS)
    assert told(seen, [EVEN, LIMPS], 10) == []
    assert told(seen, [EVEN, READS_SLOWLY], 10) == [], "it was never over"


def test_an_uneven_owner_is_told_with_its_table_and_when_it_is_over() -> None:
    seen = health()
    uneven = [window(EVEN_S, 10_000, 500_000), window(EVEN_S, 10_000, 0), window(EVEN_S, 10_000, 0)]
    even = [window(EVEN_S, 100_000, 100_000)] * 3
    (text,) = told(seen, uneven, WINDOWS)
    assert text.startswith("host 0 gets requests for 2.9 times")
    assert "table 'items'" in text
    assert seen.imbalance.ratio > 2.5
    assert told(seen, even, WINDOWS) == ["rows are asked of all owners evenly again"]


def test_deadlines_follow_the_median_step_unless_they_were_set() -> None:
    seen = health()
    assert seen.deadlines.step_s == 120.0
    seen.window([EVEN], seconds=2.0, num_steps=10)
    assert seen.deadlines.step_s == 30.0
    for _ in range(5):
        seen.window([EVEN], seconds=60.0, num_steps=10)
    assert seen.deadlines.step_s == 60.0
    assert seen.deadlines.stall_s == 18.0
    assert seen.deadlines.storage_s == 120.0
    fixed = health(FailureConfig(step_timeout_s=7.0))
    fixed.window([EVEN], seconds=60.0, num_steps=10)
    assert (fixed.deadlines.step_s, fixed.deadlines.storage_s) == (7.0, 7.0)


def test_an_owner_that_is_busy_for_its_buckets_is_told_from_ids_that_are_uneven() -> None:
    uneven = [replace(EVEN, rows_asked=(0, asked)) for asked in (900_000, 10_000, 10_000, 10_000)]
    for owners, words in (
        ([0, 1], "owns 1 of the table's 2 buckets, which is why"),
        ([0, 0, 1, 0], "owns 3 of the table's 4 buckets, which is why"),
        ([0, 1, 2, 3], "Its ids fall on few buckets"),
    ):
        seen = health()
        seen.placed({"users": [1, 2, 3, 0], "items": owners})
        (text,) = told(seen, uneven, WINDOWS)
        assert words in text
        assert "table 'items'" in text


def test_an_uneven_owner_is_not_told_where_nobody_could_gain() -> None:
    few = [replace(EVEN, rows_asked=(0, asked)) for asked in (90_000, 100)]
    many = [replace(EVEN, rows_asked=(0, asked)) for asked in (900_000, 100)]
    for hosts, owners in ((few, [0, 1, 0, 1]), (many, [0])):
        seen = health()
        seen.placed({"users": [0, 1], "items": owners})
        assert told(seen, hosts, 20) == []
        assert seen.imbalance.ratio > 1.9, "the figures of windows have it all the same"
    # A table that is cut is told of, whatever lies whole beside it.
    seen = health()
    seen.placed({"users": [1], "items": [0, 1, 0, 1]})
    (text,) = told(seen, [replace(EVEN, rows_asked=(asked, rows)) for asked, rows in ((0, 900_000), (900_000, 0))], 20)
    assert "host 0 gets requests for 2.0 times" in text


def test_what_happened_to_ids_is_said_by_its_policy() -> None:
    seen = health()
    first, second = told(seen, [replace(EVEN, altered_ids=(3, 4))])
    assert "table 'users' in a window or an evaluation were hashed, as its invalid_ids='hash' says" in first
    assert "table 'items' in a window or an evaluation were dropped, as its invalid_ids='drop' says" in second


def test_keys_that_found_no_row_are_told_once_a_table() -> None:
    seen, full = health(), VocabularyCounts(num_keys=10, num_rows=10, refused=3)
    hosts = [replace(EVEN, vocabularies={1: full}), replace(EVEN, vocabularies={0: replace(full, refused=0), 1: full})]
    (text,) = told(seen, hosts)
    assert "6 times in a window, a key found no free row in table 'items', where 20 keys have 20 rows" in text
    assert told(seen, hosts) == []


def test_keys_that_come_back_and_buckets_that_fill_early_are_told_once_a_table() -> None:
    seen = health()
    few = VocabularyCounts(num_keys=900, num_rows=1000, admitted=1000, returned=100, num_buckets=4, num_full=1)
    many = replace(few, returned=101)
    assert told(seen, [replace(EVEN, vocabularies={1: few})]) == []
    (text,) = told(seen, [replace(EVEN, vocabularies={1: many})])
    assert "101 of 1,000 keys that got a row in table 'items' in a window had lost one not long before" in text
    early = replace(many, num_keys=600)
    (text,) = told(seen, [replace(EVEN, vocabularies={1: early})] * 2)
    assert "2 of 8 buckets of table 'items' are full, while 60% of its rows have a key" in text
    assert told(seen, [replace(EVEN, vocabularies={1: early})]) == []
