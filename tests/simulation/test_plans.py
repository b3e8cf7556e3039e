"""A run that recorded two plans changes from one to the other at their commit, and does so again after every kill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.orchestrator.commit.manifest import Manifest, from_json
from podembed.orchestrator.planning.recorded_plans import ChosenRecord, PlanRecord
from tests.long_tests import long_case
from tests.simulation.model import the_model
from tests.simulation.schedule import Fault, draw
from tests.simulation.simulation import Outcome, Simulation, carried_out

NUM_HOSTS, EVERY_STEPS = 2, 3


def plan(step: int, *, pools: bool) -> PlanRecord:
    tables = tuple(
        ChosenRecord(name=table.name, is_whole=False, pools=pools, work=0.5, reason="predicted")
        for table in the_model().record.tables
    )
    return PlanRecord(step=step, num_hosts=NUM_HOSTS, why="cut", step_s=1.0, other_s=2.0, tables=tables)


# A driver recorded the second one, and was lost before the commit at which it begins to count.
FIRST, SECOND = plan(0, pools=True), plan(EVERY_STEPS, pools=False)


def run(*faults: Fault, plans: tuple[PlanRecord, ...] = (FIRST, SECOND)) -> tuple[Outcome, list[Manifest]]:
    schedule = replace(
        draw(1),
        hosts=(NUM_HOSTS,),
        every_steps=EVERY_STEPS,
        full_every=1,
        num_to_keep=None,
        faults=faults,
        keeps_hosts=True,
        changes_hosts=False,
    )
    simulation = Simulation(schedule=schedule, keeps_log=True, plans=plans)
    outcome = carried_out(simulation)
    files = simulation.shared.files
    assert sorted(name for name in files if name.startswith("plans/")) == [
        f"plans/s{plan.step:09d}-h00002.json" for plan in plans
    ]
    commits = {name for name in files if name.startswith("commit/s")}
    manifests = [from_json(name.removeprefix("commit/").removesuffix(".json"), bytes(files[name])) for name in commits]
    return outcome, sorted(manifests, key=lambda manifest: manifest.step)


def test_a_plan_changes_at_the_commit_from_which_another_one_counts() -> None:
    outcome, manifests = run()
    # The first generation, and the one that follows the second plan.
    assert outcome.num_generations == 2
    assert outcome.num_survivors > 0
    assert {manifest.generation for manifest in manifests if manifest.step <= EVERY_STEPS} == {1}
    assert {manifest.generation for manifest in manifests if manifest.step > EVERY_STEPS} == {2}


def test_one_plan_stays() -> None:
    outcome, _ = run(plans=(FIRST,))
    assert outcome.num_generations == 1


@pytest.mark.parametrize("point", [long_case("before create manifest"), "after create manifest"])
def test_a_driver_that_is_killed_around_the_change_follows_the_same_plans(point: str) -> None:
    outcome, manifests = run(Fault(action="kill", point=point, nth=1))
    assert outcome.struck["kill"] == 1
    assert_same_run(manifests)


def test_a_storage_that_is_away_while_a_first_window_ends_ends_no_driver() -> None:
    outcome, manifests = run(Fault(action="storage down", point="host step", nth=1, seconds=20.0))
    assert outcome.struck["storage down"] == 1
    assert outcome.endings == {"done": 1}
    assert_same_run(manifests)


@pytest.mark.parametrize(
    "step", [EVERY_STEPS, *(long_case(step) for step in range(1, 2 * EVERY_STEPS) if step != EVERY_STEPS)]
)
def test_a_host_that_is_killed_around_the_change_leads_to_the_same_plans(step: int) -> None:
    outcome, manifests = run(Fault(action="kill", point="host step", nth=NUM_HOSTS * step))
    assert outcome.struck["kill"] == 1
    assert_same_run(manifests)


def assert_same_run(manifests: list[Manifest]) -> None:
    """The simulation itself compares digests, and counts every sample."""
    _, calm = run()
    assert [manifest.step for manifest in manifests] == [manifest.step for manifest in calm]
    for found, undisturbed in zip(manifests, calm, strict=True):
        assert {name: len(set(owners)) for name, owners in found.placement.items()} == {
            name: len(set(owners)) for name, owners in undisturbed.placement.items()
        }
