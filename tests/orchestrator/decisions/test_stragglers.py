"""Slow hosts and uneven owners, judged by the phases and counts of one window."""

from __future__ import annotations

import pytest

from podembed.orchestrator.decisions.stragglers import (
    Imbalance,
    imbalance,
    is_notable,
    own_work_s,
    slow_hosts,
    work_ratios,
)
from podembed.workers.liveness.progress import Phase


def phases(**seconds: float) -> dict[Phase, float]:
    return {Phase(name.replace("_", " ")): spent for name, spent in seconds.items()}


EVEN = phases(read=0.2, update=0.3, activation_exchange=0.5, device=1.0)


def test_waiting_is_not_work() -> None:
    assert own_work_s(EVEN) == pytest.approx(0.5)
    assert own_work_s(phases(device=3.0, id_exchange=2.0)) == 0.0


def test_even_hosts_are_not_slow_however_long_they_wait() -> None:
    waiting = phases(read=0.2, update=0.3, activation_exchange=1.5)
    assert slow_hosts([EVEN, waiting, EVEN], window_s=2.0) == []


@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_the_slow_one_is_named_with_the_phase_that_takes_the_most_more(factor: float) -> None:
    slow = phases(read=0.2, gather=0.1, update=0.3 + 0.5 * (factor - 1))
    (found,) = slow_hosts([EVEN, phases(read=0.2, gather=0.1, update=0.2), slow], window_s=2.0)
    assert (found.host, found.phase) == (2, "update")
    assert found.ratio == pytest.approx((0.6 + 0.5 * (factor - 1)) / 0.5)
    assert "host 2 is slow" in found.sentence()
    assert "most of it in update" in found.sentence()


def test_a_phase_that_only_the_slow_one_has_counts_against_nothing() -> None:
    (found,) = slow_hosts([EVEN, EVEN | phases(wait_for_save=1.0)], window_s=2.0)
    assert (found.host, found.phase, found.others_phase_s) == (1, "wait for save", 0.0)


def test_a_large_ratio_of_little_work_is_noise() -> None:
    tiny = phases(read=0.001, device=1.9)
    assert slow_hosts([tiny, phases(read=0.02, device=1.9)], window_s=2.0) == []


def test_the_phase_is_the_one_that_differs_and_not_the_longest() -> None:
    usual = phases(read=0.4, update=0.1, device=1.5)
    (found,) = slow_hosts([usual, usual, phases(read=0.5, update=0.9)], window_s=2.0)
    assert found.phase == "update"


def test_what_it_costs_beside_the_window_decides() -> None:
    """Three times the work of the others: a fifth of a window of one second, a fiftieth of one of ten."""
    usual, slow = phases(update=0.1), phases(update=0.3)
    assert [found.host for found in slow_hosts([usual, usual, slow], window_s=1.0)] == [2]
    assert slow_hosts([usual, usual, slow], window_s=10.0) == []


def test_of_two_hosts_one_is_compared_with_the_other_alone() -> None:
    assert work_ratios([phases(update=0.4), phases(update=0.1)]) == [pytest.approx(4.0), pytest.approx(0.25)]
    assert work_ratios([phases(update=at) for at in (0.1, 0.2, 0.3)])[0] == pytest.approx(0.1 / 0.25)


def test_one_host_alone_is_never_slow_and_idle_ones_divide_by_nothing() -> None:
    assert work_ratios([EVEN]) == [1.0]
    assert slow_hosts([EVEN], window_s=2.0) == []
    assert work_ratios([phases(device=1.0), phases(device=1.0)]) == [1.0, 1.0]


def test_the_busiest_owner_and_its_table() -> None:
    found = imbalance([[1000, 4000], [1000, 500], [1000, 500]])
    assert (found.host, found.table, found.rows) == (0, 1, 5000)
    assert found.ratio == pytest.approx(5000 / (8000 / 3))


def test_the_table_is_the_one_that_differs_and_not_the_largest() -> None:
    assert imbalance([[6000, 4000], [6000, 500], [6000, 500]]).table == 1


def test_few_rows_say_nothing() -> None:
    assert imbalance([[30], [0]]).ratio == 1.0
    assert imbalance([[2000], [0]]).ratio == 2.0, "a thousand on average are enough"
    assert imbalance([]).ratio == 1.0


@pytest.mark.parametrize(
    ("ratio", "hosts", "told"),
    [(1.9, 2, True), (1.5, 2, False), (1.9, 8, False), (2.1, 8, True), (1, 1, False), (1.75, 2, True), (9, 1, False)],
)
def test_what_is_told_depends_on_how_bad_it_could_be(ratio: float, hosts: int, told: bool) -> None:
    found = Imbalance(ratio=ratio, host=0, table=0, rows=1_000_000)
    assert is_notable(found, hosts, window_s=2.0) is told
    assert not is_notable(found, hosts, window_s=20.0), "so few a second cost nobody time"
