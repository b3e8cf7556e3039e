"""Which failure domains rest, and for how long."""

from __future__ import annotations

import pytest

from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.host_watch import Quarantine

A, B = FailureDomain("a", "10.0.0.1"), FailureDomain("b")
EMPTY = Quarantine(after=2, first_s=30.0, period_s=1_000.0)


@pytest.mark.parametrize(
    ("faults", "now_s", "left_s"),
    [
        ((), 0.0, None),
        ((10.0,), 10.0, None),
        ((10.0, 20.0), 20.0, 30.0),
        ((10.0, 20.0), 45.0, 5.0),
        ((10.0, 20.0), 50.0, None),
        ((10.0, 20.0, 60.0), 60.0, 60.0),
        ((10.0, 20.0, 60.0, 130.0), 130.0, 120.0),
        # Never longer than the period.
        (tuple(float(at) for at in range(10)), 9.0, 1_000.0),
        # The first fault is forgotten by then.
        ((10.0, 1_010.0), 1_010.0, None),
        ((10.0, 1_009.0), 1_009.0, 30.0),
    ],
)
def test_a_domain_rests_longer_with_each_fault(faults: tuple[float, ...], now_s: float, left_s: float | None) -> None:
    quarantine = EMPTY
    for at in faults:
        quarantine = quarantine.noted(A, at)
    assert quarantine.resting(now_s) == ({} if left_s is None else {A: left_s})


def test_domains_are_counted_apart_by_their_names() -> None:
    quarantine = EMPTY.noted(A, 1.0).noted(B, 2.0).noted(FailureDomain("a"), 3.0)
    assert quarantine.resting(4.0) == {A: 29.0}
    assert EMPTY.resting(4.0) == {}


def test_a_second_device_that_does_not_live_long_makes_its_domain_rest_for_the_whole_period() -> None:
    once = EMPTY.noted(A, 1.0, is_early=True)
    assert once.resting(1.0) == {}
    twice = once.noted(A, 5.0, is_early=True).noted(B, 6.0, is_early=True)
    assert twice.resting(7.0) == {A: 998.0}
    assert (twice.fails_early(A), twice.fails_early(B)) == (True, False)
    assert EMPTY.noted(A, 1.0, is_early=True).noted(A, 1_001.0, is_early=True).resting(1_001.0) == {}
