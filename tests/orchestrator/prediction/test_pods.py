"""Constants of a machine get corrections from runs of made-up jobs."""

from __future__ import annotations

import os
from dataclasses import replace

from podembed.orchestrator.prediction.pods import with_pods
from podembed.workers.calibration.record import Machine
from tests.long_tests import is_long
from tests.workers.calibration.constants import CALIBRATION

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


@is_long
def test_constants_are_corrected_by_runs() -> None:
    machine = Machine(processor="testing", cpus=1)
    found = with_pods(
        replace(CALIBRATION, machine=machine), environment=ENVIRONMENT, names=("files", "memory"), window_s=0.02
    )
    assert replace(found, pods=()) == replace(CALIBRATION, machine=machine)
    (pod,) = found.pods
    assert pod.hosts == 1
    assert {"dedup", "group", "update"} <= set(pod.phases)
    assert pod.device.seconds(1e-3) > 0
    assert 0.5 <= pod.reading <= 2.0
    assert found.corrections_for(1) is found.corrections_for(64) is pod
