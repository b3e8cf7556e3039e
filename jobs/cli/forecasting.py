"""What `podembed plan` adds to the tables where this machine's constants are known: time, memory, what is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from podembed.orchestrator.api.config import FailureConfig
from podembed.orchestrator.decisions.table_plan import Plan, render
from podembed.orchestrator.planning.report import render_followed
from podembed.orchestrator.prediction.dense_half import default_path, hosts_together
from podembed.orchestrator.prediction.forecast import Placed, forecast, setting_of
from podembed.orchestrator.prediction.on_devices.proposal import dense_and_proposal, render_proposal
from podembed.orchestrator.prediction.report import render_forecast, render_profiles
from podembed.orchestrator.prediction.slices import forecast_slices, render_slices
from podembed.workers.calibration.record import read_calibration, this_machine
from podembed.workers.input.index import InputIndex
from podembed.workers.input.profile import profiles_at_hand
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference

if TYPE_CHECKING:
    from podembed.jobs.cli.main import Plan as PlanCommand
    from podembed.orchestrator.api.topology import Topology


def show(
    command: PlanCommand,
    job: JobConfig,
    reference: JobReference | None,
    index: InputIndex | None,
    *,
    plan: Callable[[int], Plan],
    placed: Placed | None = None,
    problem: str | None = None,
    topology: Topology | None = None,
) -> None:
    """Prints the tables of `podembed plan`, and what is predicted for them.

    Args:
      reference: by which a child builds the job to measure its dense half; None leaves that out.
      index: of the files for training, where they are at hand.
      plan: where tables lie on so many hosts.
      placed: where they would lie if costs decided; None leaves that out.
      problem: what is wrong with the files for training, if there is no index for that reason.
      topology: of the slices, where the plan is for slices.

    Raises:
      CalibrationError: constants cannot be used, or a child failed.
    """
    print(render(plan(command.hosts)), flush=True)
    for part in _parts(command, job, reference, index, plan=plan, placed=placed, problem=problem, topology=topology):
        print(f"\n{part}", flush=True)


def _parts(
    command: PlanCommand,
    job: JobConfig,
    reference: JobReference | None,
    index: InputIndex | None,
    *,
    plan: Callable[[int], Plan],
    placed: Placed | None,
    problem: str | None,
    topology: Topology | None,
) -> Iterator[str]:
    """The text behind the tables; only a remedy where there are no constants."""
    if problem is not None:
        yield _assumed(problem)
    path = Path(command.calibration).expanduser() if command.calibration else default_path()
    calibration = read_calibration(path, this_machine())
    if calibration is None and topology is None:
        yield _not_measured(path)
        return
    profiles = profiles_at_hand(job, index)
    if profiles.why_assumed is not None:
        yield _assumed(profiles.why_assumed)
    hosts, cpus = command.hosts, this_machine().cpus
    together = command.hosts_per_machine or hosts_together(hosts, cpus)
    setting = setting_of(
        job,
        num_hosts=hosts,
        hosts_a_machine=together,
        reads_files=index is not None,
        read_sample_s=profiles.read_sample_s,
        threads=command.threads_per_host,
    )
    if topology is not None:
        counted = forecast_slices(
            job, plan(hosts), profiles.tables, setting, topology=topology, num_slices=command.slices
        )
        yield render_slices(counted, byte_s=None if calibration is None else calibration.wire.byte_s)
    if calibration is None:
        yield _not_measured(path)
        return
    yield render_profiles(job.table_names, profiles.tables)
    if reference is None:
        yield "the dense half is left out: only a job that is named package.module:function can be measured"
    dense, proposed = dense_and_proposal(job, reference, plan(hosts), profiles.tables, setting, calibration=calibration)
    found = forecast(
        job,
        setting,
        profiles.tables,
        plan=plan,
        calibration=calibration,
        dense=dense,
        undo_share=FailureConfig().undo_share,
        placed=placed,
    )
    yield render_forecast(found)
    if proposed is not None:
        yield render_proposal(proposed)
    if placed is not None and hosts > 1:
        yield render_followed(
            job, index, calibration, profiles.tables, num_hosts=hosts, threads=command.threads_per_host
        )
    machines = "one machine" if setting.is_one_machine else f"machines with {together} of them each"
    yield f"planned for {hosts:,} on {machines} like this one, and a network like its loopback"
    yield "where it was measured, steps took 0.8 to 1.4 times as long as predicted (docs/performance.md)"


def _not_measured(path: Path) -> str:
    return f"no predicted times: {path} is not there; podembed calibrate measures this machine in some minutes"


def _assumed(problem: str) -> str:
    return (
        f"the data could not be read: {problem}\n"
        "lengths of bags are assumed where nothing else says them, and ids are taken to be spread evenly"
    )
