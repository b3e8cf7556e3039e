"""What `podembed plan` adds to the tables where this machine's constants are known: time, memory, what is faster.

At the end of a run, predicted times stand beside measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from podembed.jobs.cli.calibrating import children_environment, default_path
from podembed.orchestrator.api.config import FailureConfig
from podembed.orchestrator.decisions.table_plan import Plan, render
from podembed.orchestrator.prediction.demand import DenseHalf, Setting
from podembed.orchestrator.prediction.forecast import demands, forecast, setting_of
from podembed.orchestrator.prediction.report import render_comparison, render_forecast, render_profiles
from podembed.orchestrator.prediction.step import predict
from podembed.workers.calibration.measure import MAX_SIDE_BY_SIDE, measure_models
from podembed.workers.calibration.record import Calibration, CalibrationError, read_calibration, this_machine
from podembed.workers.input.index import InputIndex
from podembed.workers.input.profile import profiles_at_hand
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference

if TYPE_CHECKING:
    from podembed.jobs.cli.main import Plan as PlanCommand


def show(
    command: PlanCommand,
    job: JobConfig,
    reference: JobReference | None,
    index: InputIndex | None,
    *,
    plan: Callable[[int], Plan],
) -> None:
    """Prints the tables of `podembed plan`, and what is predicted for them.

    Args:
      reference: by which a child builds the job to measure its dense half; None leaves that out.
      index: of the files for training, where they are at hand.
      plan: where tables lie on so many hosts.

    Raises:
      CalibrationError: constants cannot be used, or a child failed.
    """
    print(render(plan(command.hosts)), flush=True)
    for part in _parts(command, job, reference, index, plan=plan):
        print(f"\n{part}", flush=True)


def _parts(
    command: PlanCommand,
    job: JobConfig,
    reference: JobReference | None,
    index: InputIndex | None,
    *,
    plan: Callable[[int], Plan],
) -> Iterator[str]:
    """The text behind the tables; only a remedy where there are no constants."""
    path = Path(command.calibration).expanduser() if command.calibration else default_path()
    calibration = read_calibration(path, this_machine())
    if calibration is None:
        yield f"no predicted times: {path} is not there; podembed calibrate measures this machine in 20 seconds"
        return
    profiles = profiles_at_hand(job, index)
    yield render_profiles(job.table_names, profiles)
    setting, dense = _of_job(job, reference, index, calibration, command.hosts, command.hosts_per_machine)
    if reference is None:
        yield "the dense half is left out: only a job that is named package.module:function can be measured"
    found = forecast(
        job, setting, profiles, plan=plan, calibration=calibration, dense=dense, undo_share=FailureConfig().undo_share
    )
    yield render_forecast(found)
    together = setting.hosts_a_machine
    machines = "one machine" if setting.is_one_machine else f"machines with {together} of them each"
    yield f"planned for {command.hosts:,} on {machines} like this one, and a network like its loopback"
    yield "predicted times are too short so far: measured steps took 3 to 4 times as long (docs/performance.md)"


def _of_job(
    job: JobConfig,
    reference: JobReference | None,
    index: InputIndex | None,
    calibration: Calibration,
    num_hosts: int,
    hosts_a_machine: int | None,
) -> tuple[Setting, DenseHalf]:
    """The declared setting, and the job's dense half in it."""
    cpus = calibration.machine.cpus
    together = hosts_a_machine or (num_hosts if num_hosts <= cpus else 1)
    setting = setting_of(job, num_hosts=num_hosts, hosts_a_machine=together, reads_files=index is not None)
    processes = min(num_hosts, together, cpus)
    return setting, dense_half(job, reference, calibration, num_hosts=num_hosts, num_processes=processes)


def comparison(
    job: JobConfig,
    named: JobReference | JobConfig,
    index: InputIndex,
    *,
    found: Plan,
    phase_s: Mapping[str, float],
    num_steps: float,
    calibration_path: Path | None = None,
) -> str | None:
    """Predicted and measured phases of a run that ended, side by side.

    Args:
      named: the job by the name of its function, or itself where it has none.
      found: where its tables lie.
      phase_s: seconds of each phase on host 0, of all its steps.
      calibration_path: None for the default.

    Returns:
      None where this machine has no constants, or the job has no name by which its dense half can be measured.
    """
    try:
        calibration = read_calibration(calibration_path or default_path(), this_machine())
        if calibration is None or not isinstance(named, JobReference) or not num_steps:
            return None
        setting, dense = _of_job(job, named, index, calibration, len(found.hosts), None)
    except CalibrationError as error:
        # The run ended well; constants that are of no use do not turn that into an error.
        return f"not compared with a prediction: {error}"
    step = predict(demands(job, found, profiles_at_hand(job, index)), setting, calibration=calibration, dense=dense)
    return render_comparison(step, {phase: seconds / num_steps for phase, seconds in phase_s.items()})


def dense_half(
    job: JobConfig, reference: JobReference | None, calibration: Calibration, *, num_hosts: int, num_processes: int
) -> DenseHalf:
    """The job's own training step, measured with a host's samples. Its overhead is that of this machine's device."""
    if reference is None:
        return DenseHalf(step_s=0.0, sample_s=0.0)
    samples = max(1, job.batch_size // num_hosts)
    (time,) = measure_models(
        reference,
        [samples],
        num_processes=min(num_processes, MAX_SIDE_BY_SIDE),
        environment=children_environment(calibration.threads),
    )
    step_s = min(time.step_s, calibration.dense_for(num_processes).step_s)
    sample_s = (time.step_s - step_s) / samples
    return DenseHalf(step_s=step_s, sample_s=sample_s, gradient_bytes=time.gradient_bytes)
