"""Predicted beside measured, when a run has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.api.result import Prediction, Result, UndisturbedSteps
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.run import NotPredicted
from podembed.orchestrator.planning.planner import Planner
from podembed.orchestrator.prediction.dense_half import default_path, dense_halves, hosts_together
from podembed.orchestrator.prediction.forecast import demands, setting_of
from podembed.orchestrator.prediction.on_devices.exchanged import ids_per_bag
from podembed.orchestrator.prediction.step import predict
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.calibration.record import read_calibration, this_machine
from podembed.workers.input.profile import profiles_at_hand
from podembed.workers.liveness.step_parts import parts_of_step


def with_prediction(run: OpenRun, result: Result, scaling: ScalingConfig, *, emit: Callable[[Event], None]) -> Result:
    """The result with its steps compared to a prediction, where that is possible. As `prediction_of`."""
    try:
        return replace(result, prediction=prediction_of(run, result, scaling))
    except Exception as error:
        # The run ended well. Nothing that fails here, such as a storage that is away by now, turns that into an error.
        emit(NotPredicted(reason=str(error) or type(error).__name__))
        return result


def prediction_of(
    run: OpenRun,
    result: Result,
    scaling: ScalingConfig,
    *,
    calibration_path: Path | None = None,
) -> Prediction | None:
    """What the steps of a run should have taken, and what they took.

    Args:
      calibration_path: None for the default.

    Returns:
      None where this machine has no constants, or the run nothing to compare. A short run says little, and one whose
      hosts changed had no one setting. One that was stopped may have to end soon. A job without a name cannot be built
      where its dense half is measured.

    Raises:
      CalibrationError: constants cannot be used, or a child failed.
      OSError, StorageError, DocumentRefused: they, or the run, cannot be read.
    """
    is_comparable = not (result.is_short or result.changes or result.stopped_by or scaling.is_range)
    if not is_comparable or run.reference is None or not result.median_samples_per_s:
        return None
    calibration = read_calibration(calibration_path or default_path(), this_machine())
    if calibration is None:
        return None
    job, num_hosts, cpus = run.job, scaling.least_hosts, calibration.machine.cpus
    base = run.newest_commit()
    planner = Planner(run, scaling, emit=lambda event: None)
    chosen = planner.recorded(num_hosts=num_hosts, step=result.step)
    found = planner.tables(num_hosts).plan(chosen, previous=base.placement if base else None)
    together = hosts_together(num_hosts, cpus)
    profiles = profiles_at_hand(job, run.train_index)
    setting = setting_of(
        job,
        num_hosts=num_hosts,
        hosts_a_machine=together,
        reads_files=True,
        read_sample_s=profiles.read_sample_s,
        threads=scaling.threads_per_host or 1,
    )
    (dense,) = dense_halves(
        job,
        run.reference,
        calibration,
        num_hosts=num_hosts,
        num_processes=min(together, cpus),
        threads=scaling.threads_per_host or 1,
        lengths=ids_per_bag(job, profiles.tables),
    )
    step = predict(demands(job, found, profiles.tables), setting, calibration=calibration, dense=dense)
    steps = _measured(result, batch_size=job.batch_size)
    assert steps.step_s is not None
    return Prediction(
        step_s=step.step_s,
        phase_s=step.parts_s,
        measured_step_s=steps.step_s,
        measured_phase_s=parts_of_step(steps.phase_s, steps.phase_cpu_s, steps.step_s),
        saving_step_s=steps.saving_step_s,
        saving_share=steps.saving_share,
        is_beside_saves=result.undisturbed.step_s is None and steps.saving_step_s is not None,
    )


def _measured(result: Result, *, batch_size: int) -> UndisturbedSteps:
    """The steps without a save; all of them where there are too few, since saves followed each other."""
    if result.undisturbed.step_s is not None:
        return result.undisturbed
    num_steps = result.num_samples / batch_size
    phase_s, phase_cpu_s = (
        {phase: seconds / num_steps for phase, seconds in phases.items()}
        for phases in (result.phase_s, result.phase_cpu_s)
    )
    step_s = batch_size / result.median_samples_per_s
    return replace(result.undisturbed, step_s=step_s, phase_s=phase_s, phase_cpu_s=phase_cpu_s)
