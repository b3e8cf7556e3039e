"""`podembed plan`: where the tables of a job or of a run would lie on so many hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from podembed.jobs.cli.data_arguments import plan_arguments
from podembed.jobs.cli.forecasting import show
from podembed.jobs.cli.job_choice import job_reference
from podembed.jobs.cli.settings import named_by_flags
from podembed.jobs.search_path import current_folder
from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.api.policy_checks import check_hosts
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.decisions.table_plan import plan as plan_tables
from podembed.orchestrator.planning.planner import planned
from podembed.orchestrator.run.opening import open_run
from podembed.workers.input.lengths import index_at_hand
from podembed.workers.job.reference import JobReference

if TYPE_CHECKING:
    from podembed.jobs.cli.main import Plan


def plan(command: Plan) -> int:
    """Prints how tables would lie on so many hosts. Returns the exit code.

    Raises:
      ConfigurationError: `train` and `resume` would refuse the job, or so many hosts, as well.
    """
    with named_by_flags():
        scaling = ScalingConfig(
            num_hosts=command.hosts,
            topology=command.topology,
            accelerator_type=command.accelerator_type,
            num_slices=command.slices,
        )
    if scaling.slices is not None:
        # As many hosts as the slices have machines.
        command = replace(command, hosts=scaling.least_hosts, hosts_per_machine=command.hosts_per_machine or 1)
    if command.hosts_per_machine is not None and command.hosts_per_machine < 1:
        raise ConfigurationError(f"Found --hosts-per-machine {command.hosts_per_machine}. Expected at least 1.")
    if command.run is None:
        job_name = command.job or ("criteo" if command.data else "synthetic")
        reference = job_reference(job_name, command.set, plan_arguments(job_name, command.data))
        job = reference.resolve()
        check_hosts(job, scaling)
        index, problem = index_at_hand(job)
        show(
            command,
            job,
            reference,
            index,
            plan=lambda hosts: plan_tables(job, num_hosts=hosts, index=index),
            placed=lambda chosen: plan_tables(job, num_hosts=command.hosts, index=index, chosen=chosen),
            problem=problem,
            topology=scaling.slices,
        )
        return 0
    if command.job or command.data or command.set:
        raise ConfigurationError(
            "Found RUN with --job, --data or --set. Expected one or the other: a run has its job recorded."
        )
    run = open_run(command.run, only_reads=True, job_folder=current_folder())
    check_hosts(run.job, scaling)
    base = run.newest_commit()
    print(
        f"{plural(base.hosts, 'host')} at commit {base.name}, {command.hosts} planned\n" if base else "no commit yet\n"
    )
    reference = run.job_for_workers if isinstance(run.job_for_workers, JobReference) else None
    show(
        command,
        run.job,
        reference,
        run.train_index,
        plan=lambda hosts: planned(run, base, num_hosts=hosts),
        topology=scaling.slices,
    )
    return 0
