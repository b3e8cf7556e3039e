"""Random schedules of slices over the real driver, on a fake clock: a short form of `make simulate-slices`, and proof
that it can fail.
"""

from __future__ import annotations

import pytest

from tests.simulation.slices.__main__ import SliceTally
from tests.simulation.slices.backend import SliceBackend
from tests.simulation.slices.machines import Machines
from tests.simulation.slices.simulation import EVENTS, simulate

SHORT = range(1, 26)


def test_random_schedules_of_slices_keep_all_invariants() -> None:
    tally = SliceTally()
    for seed in SHORT:
        tally.run(seed)
    assert not tally.failed, tally.render(1.0)
    # Otherwise green would mean little.
    assert len(+tally.happened) >= len(EVENTS) - 2, tally.render(1.0)
    assert tally.totals["generations"] > 2 * len(SHORT)
    assert tally.totals["survivors"] > 10


def test_a_seed_has_one_history() -> None:
    first, second = (simulate(3, keeps_log=True) for _ in range(2))
    assert first == second
    assert len(first.outcome.log) > 20


def _leaks(patch: pytest.MonkeyPatch) -> None:
    """A backend that gives nothing back when its hosts are stopped."""
    patch.setattr(Machines, "release", lambda machines, name, driver: None)


def _reserves_again(patch: pytest.MonkeyPatch) -> None:
    """A backend that forgets what it has when some of its hosts live on."""
    real = SliceBackend._hold
    patch.setattr(SliceBackend, "_hold", lambda backend, known, on_wait: real(backend, set(), on_wait))


@pytest.mark.parametrize("fault", [_leaks, _reserves_again])
def test_broken_code_is_found(fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)  # type: ignore[operator]
    tally = SliceTally()
    for seed in range(1, 9):
        tally.run(seed)
    assert tally.failed
