"""`predict`: how long each phase of a step takes on a host, and what crosses the network.

`parts` says what lookups and exchanges take by themselves, and `timeline` puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand, traffic_of
from podembed.orchestrator.prediction.parts import HostSeconds, Wire
from podembed.orchestrator.prediction.timeline import PredictedStep, Timeline
from podembed.workers.calibration.record import Calibration


def predict(
    tables: Sequence[TableDemand], setting: Setting, *, calibration: Calibration, dense: DenseHalf
) -> PredictedStep:
    """A step of these tables. A function of its arguments alone; its work grows with tables plus hosts."""
    if setting.overlap is None:
        both = [
            predict(tables, replace(setting, overlap=one), calibration=calibration, dense=dense)
            for one in (False, True)
        ]
        return min(both, key=lambda step: step.step_s)
    return timeline_of(tables, setting, calibration=calibration, dense=dense).step()


def timeline_of(
    tables: Sequence[TableDemand], setting: Setting, *, calibration: Calibration, dense: DenseHalf
) -> Timeline:
    """The hosts of a step that is to be followed. `Setting.overlap` is not None."""
    traffic = traffic_of(tables, setting)
    seconds = HostSeconds(tables, traffic, setting, calibration.kernels_for(setting.share_a_machine))
    return Timeline(seconds, Wire(traffic, setting, calibration), setting, calibration, dense)
