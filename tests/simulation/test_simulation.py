"""Random schedules of faults over the real driver, on a fake clock: a short form of `make simulate`, and proof that it
can fail.

Thousands of seeds are for `make simulate`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.campaign import Failed, Tally, render, run_seed
from tests.simulation.mutations import MUTATIONS
from tests.simulation.schedule import ACTIONS, Schedule, draw
from tests.simulation.simulation import simulate
from tests.simulation.witness import Violation

KEPT = sorted((Path(__file__).parent / "kept").glob("*.json"))
# As few as meet every action.
SHORT = range(1, 31)


def test_random_schedules_keep_all_invariants() -> None:
    tally = Tally()
    for seed in SHORT:
        tally.add(run_seed(seed))
    print(render(tally, wall_s=1.0, seeds=SHORT))
    assert not tally.failed, render(tally, wall_s=1.0, seeds=SHORT)
    # Otherwise green would mean little.
    assert len(+tally.struck) >= len(ACTIONS) - 2
    assert tally.totals["generations"] > 2 * len(SHORT)
    assert tally.endings["Fenced"] > 5
    assert tally.most_lost_steps > 0
    assert tally.totals["survivors"] > 10


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_schedules_that_once_failed(path: Path) -> None:
    simulate(Schedule.from_json(path.read_text()))


def test_a_seed_has_one_history() -> None:
    first, second = (simulate(draw(3), keeps_log=True) for _ in range(2))
    assert first == second
    assert len(first.log) > 20


def test_a_schedule_survives_its_file() -> None:
    schedule = draw(11)
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize("mutation", [*MUTATIONS])
def test_broken_code_is_found(mutation: str) -> None:
    """In a few seeds, or, where two drivers must meet at one instant, in a schedule that was kept when the campaign
    found it.
    """
    kept = Path(__file__).parent / "kept" / f"{mutation}.json"
    with MUTATIONS[mutation]():
        if kept.exists():
            with pytest.raises(Violation):
                simulate(Schedule.from_json(kept.read_text()))
        else:
            found = (run for run in map(run_seed, range(1, 31)) if isinstance(run, Failed))
            assert next(found, None) is not None, f"30 seeds do not notice {mutation}"
