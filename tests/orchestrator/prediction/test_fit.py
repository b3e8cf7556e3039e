"""Corrections are found again in steps that were made up with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.embedding.costs.work import TableWay
from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand
from podembed.orchestrator.prediction.fit import MeasuredPod, corrections, fitted
from podembed.orchestrator.prediction.step import timeline_of
from podembed.orchestrator.prediction.timeline import Timeline
from podembed.workers.calibration.pod import PodSteps
from podembed.workers.calibration.record import Calibration, Correction, PodCorrections, Waiting
from tests.orchestrator.prediction.test_step import ROOMY, SETTING, table
from tests.workers.calibration.constants import CALIBRATION

TRUTH = PodCorrections(
    hosts=2,
    phases={
        "between phases": Correction(constant_s=1e-4, cold_s=2e-4),
        "read": Correction(constant_s=1e-4),
        "dedup": Correction(factor=1.5, call_s=2e-5),
        "id exchange": Correction(factor=1.0, constant_s=3e-4),
        "group": Correction(),
        "update": Correction(factor=2.0, constant_s=1e-4),
    },
    device=Correction(factor=1.2, constant_s=1e-3),
    waiting=Waiting(meeting_s=2e-4, spread=0.0, device_s=2e-3, device_weight=1.0),
    reading=1.0,
)


def made_up(timeline: Timeline) -> PodSteps:
    """What a machine with the corrections of this timeline would have measured."""
    found = timeline.step()
    cpu_s: dict[str, float] = {}
    for piece in timeline.pieces:
        cpu_s[str(piece.phase)] = cpu_s.get(str(piece.phase), 0.0) + float(timeline.cpu_s(piece)[0])
    hosts = len(timeline.pieces[0].alone.seconds)
    return PodSteps(
        step_s=found.step_s,
        phase_s=({str(phase): spent for phase, spent in found.phase_s.items()},) * hosts,
        phase_cpu_s=(cpu_s,) * hosts,
        host_cpu_s=(sum(cpu_s.values()),) * hosts,
        device_s=(found.device_s,) * hosts,
        device_cpu_s=(timeline.device_cpu_s,) * hosts,
        gradient_bytes=0.0,
    )


@pytest.mark.parametrize("calibration", [ROOMY, CALIBRATION])
def test_a_fit_finds_what_steps_were_made_with(calibration: Calibration) -> None:
    pods = []
    for at, samples in enumerate((500, 1000, 2000, 4000)):
        tables: list[TableDemand] = [table(TableWay.PARTIAL, at=number) for number in range(1 + at)]
        setting: Setting = replace(SETTING, batch_size=samples)
        dense = DenseHalf(step_s=1e-3 * (1 + at), sample_s=0.0)

        def of(
            found: PodCorrections | None,
            tables: list[TableDemand] = tables,
            setting: Setting = setting,
            dense: DenseHalf = dense,
        ) -> Timeline:
            known = replace(calibration, pods=() if found is None else (found,))
            return timeline_of(tables, setting, calibration=known, dense=dense)

        pods.append(MeasuredPod(timeline=of, steps=made_up(of(TRUTH))))
    found = corrections(pods, hosts=2, reading=1.0)
    assert found.hosts == 2
    for name, expected in TRUTH.phases.items():
        assert found.phases[name].error < 0.02, name
        if name in ("group", "update"):
            assert found.phases[name].factor == pytest.approx(expected.factor, rel=0.05), name
    assert found.device.seconds(2e-3, cold=0.5) == pytest.approx(1.2 * 2e-3 + 1e-3, rel=0.02)
    assert found.waiting.device_s == pytest.approx(2e-3, rel=0.3)
    for pod in pods:
        assert pod.timeline(found).step().step_s == pytest.approx(pod.steps.step_s, rel=0.05)


def test_a_phase_of_which_only_calls_are_known_gets_a_time_for_each() -> None:
    found = fitted([(0.0, 0.0, calls, 0.0, 1e-5 * calls + 1e-4) for calls in (1, 10, 100, 1000)])
    assert found.call_s == pytest.approx(1e-5)
    assert found.constant_s == pytest.approx(1e-4)
    assert found.seconds(1.0, cold=1.0, calls=10.0) == pytest.approx(2e-4)


def test_one_phase_that_did_not_take_place_does_not_decide() -> None:
    samples = [(work, 0.0, 1.0, 0.0, 2 * work) for work in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)]
    assert fitted([*samples, (2e-3, 0.0, 1.0, 0.0, 1e-6)]).factor == pytest.approx(2.0)


def test_vectors_that_another_process_wrote_have_a_time_of_their_own() -> None:
    samples = [
        (work, 0.0, 1.0, floats, work + 1e-9 * floats) for work, floats in ((1e-3, 1e6), (4e-3, 1e5), (1e-2, 1e7))
    ]
    found = fitted(samples)
    assert found.float_s == pytest.approx(1e-9)
    assert found.factor == pytest.approx(1.0)


def test_what_a_phase_takes_where_caches_are_cold_is_told_from_what_it_always_takes() -> None:
    found = fitted([(work, cold, 1.0, 0.0, work + 1e-4 + 2e-4 * cold) for work in (1e-4, 1e-3) for cold in (0.1, 0.9)])
    assert found.cold_s == pytest.approx(2e-4)
    assert found.once_s(0.0) + found.call_s == pytest.approx(1e-4)
    assert found.once_s(0.5) + found.call_s == pytest.approx(2e-4)
