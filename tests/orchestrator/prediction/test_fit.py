"""Corrections are found again in steps that were made up with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.embedding.costs.work import TableWay
from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand
from podembed.orchestrator.prediction.fit import MeasuredPod, corrections, fitted
from podembed.orchestrator.prediction.step import predict, timeline_of
from podembed.workers.calibration.pod import PodSteps
from podembed.workers.calibration.record import Calibration, Correction, PodCorrections
from podembed.workers.liveness.progress import Phase
from tests.orchestrator.prediction.test_step import ROOMY, SETTING, table
from tests.workers.calibration.constants import CALIBRATION


def made_up(calibration: Calibration, tables: list[TableDemand], setting: Setting, dense: DenseHalf) -> PodSteps:
    """What a machine with these corrections would have measured."""
    found = predict(tables, setting, calibration=calibration, dense=dense)
    phase_s = {str(phase): spent for phase, spent in found.phase_s.items() if phase is not Phase.BETWEEN}
    return PodSteps(
        step_s=found.step_s,
        phase_s=(phase_s,) * setting.num_hosts,
        device_s=(found.device_s,) * setting.num_hosts,
        gradient_bytes=0.0,
    )


@pytest.mark.parametrize("calibration", [ROOMY, CALIBRATION])
def test_a_fit_finds_what_steps_were_made_with(calibration: Calibration) -> None:
    truth = PodCorrections(
        hosts=2,
        phases={
            "read": Correction(constant_s=3e-4),
            "dedup": Correction(factor=1.5, constant_s=2e-4),
            "update": Correction(factor=2.0),
            "id exchange": Correction(factor=1.0, constant_s=5e-4),
        },
        device=Correction(factor=1.2, constant_s=3e-3),
        between=Correction(factor=0.1, constant_s=1e-4),
        reading=1.0,
    )
    pods = []
    for at, samples in enumerate((500, 1000, 2000, 4000)):
        tables = [table(TableWay.PARTIAL, at=number) for number in range(1 + at)]
        setting = replace(SETTING, batch_size=samples)
        dense = DenseHalf(step_s=1e-3 * (1 + at), sample_s=0.0)
        timeline = timeline_of(tables, setting, calibration=calibration, dense=dense)
        timeline.step()
        steps = made_up(replace(calibration, pods=(truth,)), tables, setting, dense)
        pods.append(MeasuredPod(timeline=timeline, steps=steps))
    found = corrections(pods, hosts=2, cpus=calibration.machine.cpus, reading=1.0)
    assert found.hosts == 2
    for name, expected in truth.phases.items():
        assert found.phases[name].error < 0.02, name
        if name in ("dedup", "update"):
            assert found.phases[name].factor == pytest.approx(expected.factor, rel=0.05, abs=0.02), name
            assert found.phases[name].constant_s == pytest.approx(expected.constant_s, rel=0.1, abs=1e-5), name
    assert found.phases["group"].factor == pytest.approx(1.0, rel=0.05)
    assert found.device.constant_s == pytest.approx(3e-3, rel=0.1)
    corrected = replace(calibration, pods=(found,))
    for pod, samples in zip(pods, (500, 1000, 2000, 4000), strict=True):
        at = pods.index(pod)
        again = predict(
            [table(TableWay.PARTIAL, at=number) for number in range(1 + at)],
            replace(SETTING, batch_size=samples),
            calibration=corrected,
            dense=DenseHalf(step_s=1e-3 * (1 + at), sample_s=0.0),
        )
        assert again.step_s == pytest.approx(pod.steps.step_s, rel=0.05)


def test_few_samples_give_a_constant() -> None:
    assert fitted([(1e-3, 1.0, 4e-3)]) == Correction(constant_s=3e-3)
    assert fitted([(1e-3, 1.0, 5e-4)]) == Correction()


def test_an_exchange_takes_longer_after_longer_work() -> None:
    found = fitted([(1e-4, work, 3e-4 + 0.1 * work) for work in (1e-3, 2e-3, 5e-3, 1e-2)])
    assert found.before == pytest.approx(0.1, rel=1e-3)
    assert found.seconds(1e-4, before_s=4e-3) == pytest.approx(7e-4, rel=1e-3)
