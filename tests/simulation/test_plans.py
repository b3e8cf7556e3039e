"""A run whose data makes its first plan wrong changes it once, at a commit, and goes on with it after every kill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.embedding.costs.constants import Counts
from podembed.embedding.costs.profile import TableProfile
from podembed.orchestrator.commit.manifest import Manifest, from_json
from podembed.orchestrator.planning.records import PlanningRecord, PlanRecord, ProfileRecord
from podembed.workers.storage.records import decode
from tests.long_tests import long_case
from tests.simulation.schedule import Fault, draw
from tests.simulation.simulation import Outcome, Simulation, carried_out
from tests.workers.calibration.constants import CALIBRATION, KEYS

NUM_HOSTS, EVERY_STEPS = 2, 3
SHORT = TableProfile(
    ids_per_sample=(1.0,), distinct=((1.0, 1.0), (4.0, 4.0)), hot_share=1.0, free_bags=1.0, free_rows=1.0
)
LONG = replace(SHORT, ids_per_sample=(50.0,), distinct=((1.0, 10.0), (4.0, 10.0)))


def slow_machine() -> PlanningRecord:
    """A second for each row that travels, a tenth for each id that an owner pools, and much for a whole table. So bags
    of one id are pooled, and of long ones the few rows travel.
    """
    factors = dict.fromkeys(KEYS, Counts().values)
    factors["dedup/rows"] = Counts(rows=1e9).values
    factors["dedup/partial"] = Counts(ids=1e8).values
    factors["dedup/pooled"] = Counts(ids=1e11).values
    kernels = tuple(replace(one, factors_ns=factors) for one in CALIBRATION.kernels)
    calibration = replace(CALIBRATION, kernels=kernels)
    return PlanningRecord(calibration=calibration, threads=1, profiles=(ProfileRecord.of(SHORT),) * 2)


def run(*faults: Fault, profile: TableProfile = LONG) -> tuple[Outcome, dict[str, PlanRecord], list[Manifest]]:
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
    simulation = Simulation(schedule=schedule, keeps_log=True, planning=slow_machine(), profiles=(profile,) * 2)
    outcome = carried_out(simulation)
    files = simulation.shared.files
    names = sorted(name for name in files if name.startswith("plans/"))
    plans = {name: decode(PlanRecord, name, bytes(files[name])) for name in names}
    commits = {name for name in files if name.startswith("commit/s")}
    manifests = [from_json(name.removeprefix("commit/").removesuffix(".json"), bytes(files[name])) for name in commits]
    return outcome, plans, sorted(manifests, key=lambda manifest: manifest.step)


def ways(record: PlanRecord) -> list[bool]:
    return [table.pools for table in record.tables]


def test_a_plan_that_data_proves_wrong_changes_once_at_the_first_commit() -> None:
    outcome, plans, manifests = run()
    assert [*plans] == ["plans/s000000000-h00002.json", "plans/s000000003-h00002.json"]
    first, second = plans.values()
    assert (ways(first), ways(second)) == ([True, True], [False, False])
    assert second.step_s < 0.85 * second.other_s
    # The first generation, and the one that follows the new plan.
    assert outcome.num_generations == 2
    assert outcome.num_survivors > 0
    assert {manifest.generation for manifest in manifests if manifest.step <= EVERY_STEPS} == {1}
    assert {manifest.generation for manifest in manifests if manifest.step > EVERY_STEPS} == {2}


def test_a_plan_that_data_proves_right_stays() -> None:
    outcome, plans, _ = run(profile=SHORT)
    assert [*plans] == ["plans/s000000000-h00002.json"]
    assert outcome.num_generations == 1


@pytest.mark.parametrize(
    "point",
    [
        *map(long_case, ["before create plans", "before create manifest"]),
        "after create plans",
        "after create manifest",
    ],
)
def test_a_driver_that_is_killed_around_the_change_leads_to_the_same_plans(point: str) -> None:
    _, expected, calm = run()
    # The first record of a plan is that of the beginning.
    outcome, plans, manifests = run(Fault(action="kill", point=point, nth=2 if "plans" in point else 1))
    assert outcome.struck["kill"] == 1
    assert_same_run(plans, manifests, expected, calm)


@pytest.mark.parametrize("action", [long_case("refused"), "answer lost", long_case("conflict")])
def test_a_storage_that_fails_while_a_plan_is_recorded_is_asked_again(action: str) -> None:
    _, expected, calm = run()
    outcome, plans, manifests = run(Fault(action=action, point="before create plans", nth=2))
    assert outcome.struck[action] == 1
    assert_same_run(plans, manifests, expected, calm)


def test_a_storage_that_is_away_while_a_first_window_ends_ends_no_driver() -> None:
    _, expected, calm = run()
    outcome, plans, manifests = run(Fault(action="storage down", point="host step", nth=1, seconds=20.0))
    assert outcome.struck["storage down"] == 1
    assert outcome.endings == {"done": 1}
    assert_same_run(plans, manifests, expected, calm)


@pytest.mark.parametrize(
    "step", [EVERY_STEPS, *(long_case(step) for step in range(1, 2 * EVERY_STEPS) if step != EVERY_STEPS)]
)
def test_a_host_that_is_killed_around_the_change_leads_to_the_same_plans(step: int) -> None:
    _, expected, calm = run()
    outcome, plans, manifests = run(Fault(action="kill", point="host step", nth=NUM_HOSTS * step))
    assert outcome.struck["kill"] == 1
    assert_same_run(plans, manifests, expected, calm)


def assert_same_run(
    plans: dict[str, PlanRecord], manifests: list[Manifest], expected: dict[str, PlanRecord], calm: list[Manifest]
) -> None:
    """The simulation itself compares digests, and counts every sample."""
    assert plans == expected
    assert [manifest.step for manifest in manifests] == [manifest.step for manifest in calm]
    for found, undisturbed in zip(manifests, calm, strict=True):
        assert {name: len(set(owners)) for name, owners in found.placement.items()} == {
            name: len(set(owners)) for name, owners in undisturbed.placement.items()
        }
