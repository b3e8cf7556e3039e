"""`podembed plan`: where the tables of a job or of a run would lie on so many hosts, and what that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from podembed.jobs.cli.data_arguments import plan_arguments
from podembed.jobs.cli.job_choice import job_reference
from podembed.jobs.cli.settings import named_by_flags
from podembed.jobs.planning.data_at_hand import index_at_hand, profiles_at_hand
from podembed.jobs.planning.memory import host_memory, render_keys, render_memory
from podembed.jobs.planning.step import render_step
from podembed.jobs.planning.tables import render_tables
from podembed.jobs.search_path import current_folder
from podembed.orchestrator.api.config import ConfigurationError, FailureConfig, ScalingConfig
from podembed.orchestrator.api.policy_checks import check_hosts
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.decisions.device_room import room_of
from podembed.orchestrator.decisions.table_plan import PlacementPlan as PlannedTables
from podembed.orchestrator.decisions.table_plan import plan as plan_tables
from podembed.orchestrator.planning.recorded import planned
from podembed.orchestrator.planning.traffic import traffic_of
from podembed.orchestrator.run.opening import open_run
from podembed.workers.input.index import InputIndex
from podembed.workers.job.auto_places import chosen_places, with_places
from podembed.workers.job.job import JobConfig

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
            devices_per_host=command.devices_per_host,
        )
    # With slices, as many hosts as these have machines.
    num_hosts, problem, parts = scaling.least_hosts, None, scaling.devices.sample_multiple
    if command.run is None:
        job_name = command.job or ("criteo" if command.data else "synthetic")
        job = job_reference(job_name, command.set, plan_arguments(job_name, command.data)).resolve()
        check_hosts(job, scaling)
        job = with_places(job, chosen_places(job, room_of(scaling)))
        index, problem = index_at_hand(job)
        found = plan_tables(job, num_hosts=num_hosts, index=index, parts_per_host=parts)
    else:
        if command.job or command.data or command.set:
            raise ConfigurationError(
                "Found RUN with --job, --data or --set. Expected one or the other: a run has its job recorded."
            )
        run = open_run(command.run, only_reads=True, job_folder=current_folder())
        run = replace(run, job=with_places(run.job, chosen_places(run.job, room_of(scaling))))
        job, index = run.job, run.train_index
        check_hosts(job, scaling)
        base = run.newest_commit()
        hosts = plural(base.hosts, "host") if base else ""
        print(f"{hosts} at commit {base.name}, {num_hosts} planned\n" if base else "no commit yet\n")
        found = planned(run, base, num_hosts=num_hosts, parts_per_host=parts)
    print(render_tables(found), flush=True)
    _show_step(job, found, index, problem=problem)
    return 0


def _show_step(job: JobConfig, found: PlannedTables, index: InputIndex | None, *, problem: str | None) -> None:
    """What a step asks of the tables, and what memory that takes.

    Args:
      index: index of the files for training, where they are at hand.
      problem: what is wrong with the files for training, if there is no index for that reason.
    """
    profiles = profiles_at_hand(job, index)
    if (why := problem or profiles.why_assumed) is not None:
        print(f"\nthe data could not be read: {why}")
    traffic = traffic_of(job, found, profiles.tables)
    memory = host_memory(job, found, traffic, undo_share=FailureConfig().undo_share)
    print(f"\n{render_step(traffic, profiles)}", flush=True)
    print(f"\n{render_memory(memory)}", flush=True)
    if keys := render_keys([table.spec for table in found.tables]):
        print(f"\n{keys}", flush=True)
