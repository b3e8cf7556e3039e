"""What all rounds of a campaign share: the job with its settings, the program, and the environment of its processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podembed.embedding.lookup.compiled import compile_kernels
from podembed.jobs.built_in import BUILT_IN_JOBS, parse_settings
from podembed.jobs.chaos.jobs import DEFAULT_FOLDER
from podembed.jobs.chaos.round import Campaign
from podembed.jobs.chaos.schedule import RunShape
from podembed.jobs.search_path import current_folder, new_process
from podembed.jobs.synthetic import DEFAULT_FOLDER as SYNTHETIC_FOLDER
from podembed.workers.input.index import build_index
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import choose_buckets, table_specs


def make_campaign(
    shape: RunShape,
    *,
    job_name: str | None,
    job_settings: tuple[str, ...],
    in_process: bool,
    timeout_s: float,
    environment: Mapping[str, str],
    command_line: Callable[[list[str]], None],
) -> Campaign:
    """A campaign for runs of this shape.

    Args:
      job_name: job name as `train --job` has it; None for the tiny job.
      job_settings: job settings as `train --set` has them.
      in_process: rounds are forks of this process, which call `command_line`.
      timeout_s: longest time for a round.
      environment: environment of the processes of a round.

    Raises:
      JobError: the job cannot be made.
    """
    settings: dict[str, Any] = dict(parse_settings(job_settings))
    function = BUILT_IN_JOBS.get(job_name or "", job_name) or "podembed.jobs.chaos.jobs:tiny"
    if job_name in (None, "synthetic"):
        default = DEFAULT_FOLDER if job_name is None else SYNTHETIC_FOLDER
        settings["folder"] = str(Path(str(settings.get("folder", default))).absolute())
    job = JobReference(function=function, arguments=settings, folder=current_folder()).resolve()
    return Campaign(
        function=function,
        settings=settings,
        audit_rows=_audit_rows(job),
        shape=shape,
        program=tuple(new_process()),
        environment=environment,
        run_forked=_run_forked(job, command_line) if in_process else None,
        timeout_s=timeout_s,
    )


def _run_forked(job: JobConfig, command_line: Callable[[list[str]], None]) -> Callable[[Sequence[str]], int]:
    """The command line as a function for forks; all that it imports and compiles for the job is loaded here, once."""
    # The command line imports late, so that its help is quick.
    importlib.import_module("podembed.jobs.cli.launch")
    compile_kernels(table_specs(job, choose_buckets(job)))

    def run(arguments: Sequence[str]) -> int:
        try:
            command_line(list(arguments))
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        return 0

    return run


def _audit_rows(job: JobConfig) -> int | None:
    """Rows that an audit table needs: one for each sample, if the data names its samples."""
    return None if job.data.sample_id is None else build_index(job.resolved_data).num_rows
