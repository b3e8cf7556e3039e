"""`podembed chaos`: runs a job undisturbed, then again and again with faults injected, and says whether anything is
different at the end.

Here are its flags, the cluster that all rounds share, and the environment of their processes. What is injected is in
`jobs.chaos.schedule`, how a round runs in `jobs.chaos.round`, what must hold after it in `jobs.chaos.oracles`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podembed.jobs.chaos.oracles import Judgement, Measure
    from podembed.jobs.chaos.round import Campaign

EXIT_NOT_MET = 1
MARK = "PODEMBED_CHAOS"


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Inject faults into a job of yours, or into a tiny one, and check that nothing is lost, doubled or different.

    Each round is a run of its own, supervised, with one schedule of faults; its end is compared with a run without
    faults. Exits with 0 if all oracles hold in every round. docs/faults.md tells how to read the table.
    """

    job: str | None = None
    """As for train; by default a tiny generated job of a few seconds."""
    set: tuple[str, ...] = ()
    """As for train."""
    only: str | None = None
    """Numbers of docs/faults.md, separated by commas, such as F1,F6; F6.3 is the third schedule of F6; all stands for
    the whole list.
    """
    rounds: int = 0
    """So many random schedules, drawn from --seed on, after those of --only. Alone, without --only, nothing else is
    run.
    """
    seed: int = 1
    """Seed of the first random schedule; the next ones follow."""
    plan: str | None = None
    """Run one schedule: the faults of this file, as `train --fault-plan` takes it; its folder is replaced."""
    hosts: int = 2
    """Hosts of a run."""
    in_process: bool = False
    """One host in the driver's own process, without Ray: rounds of a few seconds. What strikes a host then strikes the
    driver.
    """
    steps: int = 60
    """Steps of a run."""
    checkpoint_every: int = 10
    """Steps between commits."""
    detect_s: float = 15.0
    """Longest time from a fault to its notice."""
    recover_s: float = 60.0
    """Longest time from the notice to the next finished window."""
    timeout_s: float = 300.0
    """Longest time for a round."""
    folder: str | None = None
    """Where runs lie; by default a temporary folder, of which the rounds that are not met are kept. A folder that
    holds the undisturbed run of the same job, and what was compiled, saves both. Remove it when the code of the job has
    changed.
    """
    list: bool = False
    """Print the schedules and run none."""
    stop_after_s: float = float("inf")
    """Begin no further round when so many seconds have passed; those that were left out are named."""


def run(command: Chaos, *, command_line: Callable[[list[str]], None]) -> int:
    """Runs the rounds that are requested. Returns the exit code.

    Args:
      command: what to run.
      command_line: `podembed` as a function of its arguments, for rounds in forks of this process.

    Raises:
      ConfigurationError: flags that select nothing, or a job that cannot be used.
      FaultPlanError: `--plan` is no plan.
    """
    from podembed.jobs.chaos.plan_file import describe
    from podembed.jobs.chaos.schedule import RunShape
    from podembed.jobs.chaos.selection import select

    num_hosts = 1 if command.in_process else command.hosts
    shape = RunShape(num_hosts=num_hosts, num_steps=command.steps, commit_every=command.checkpoint_every)
    schedules = select(
        shape,
        only=command.only or "",
        num_random=command.rounds,
        first_seed=command.seed,
        plan=command.plan,
        in_process=command.in_process,
    )
    if command.list:
        for schedule in schedules:
            print(f"{schedule.label:7s} {schedule.title}")
            for fault in schedule.faults:
                print(f"        {describe(fault)}")
        return 0
    started_s = time.monotonic()
    folder = Path(command.folder or tempfile.mkdtemp(prefix="podembed-chaos-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    # Before the cluster starts, whose processes inherit it, and before JAX is imported, which reads it then.
    os.environ.update(inherited := _inherited(mark, folder))
    from podembed.jobs.chaos.campaign import make_campaign
    from podembed.jobs.chaos.rounds import run_rounds, undisturbed_run
    from podembed.orchestrator.cluster.connection import cluster_address, connected

    try:
        with contextlib.ExitStack() as stack:
            environment = dict(os.environ)
            if not command.in_process:
                stack.enter_context(connected(max(num_hosts, *(schedule.hosts_after or 0 for schedule in schedules))))
                environment = dict(os.environ) | {"RAY_ADDRESS": cluster_address()}
            campaign = make_campaign(
                shape,
                job_name=command.job,
                job_settings=command.set,
                in_process=command.in_process,
                timeout_s=command.timeout_s,
                environment=environment,
                command_line=command_line,
            )
            judgements = run_rounds(
                campaign,
                schedules,
                _measure(command, undisturbed_run(campaign, folder), campaign, mark),
                folder=folder,
                stop_after_s=command.stop_after_s,
            )
    finally:
        for name in inherited:
            del os.environ[name]
        _tidy(folder, is_temporary=command.folder is None)
    return _tell(command, judgements, mark, seconds=time.monotonic() - started_s)


def _measure(command: Chaos, reference: str, campaign: Campaign, mark: str) -> Measure:
    from podembed.jobs.chaos.jobs import AUDIT
    from podembed.jobs.chaos.oracles import Measure

    return Measure(
        reference=reference,
        audit=None if campaign.audit_rows is None else AUDIT,
        mark=f"{MARK}={mark}".encode(),
        detect_s=command.detect_s,
        recover_s=command.recover_s,
    )


def _inherited(mark: str, folder: Path) -> dict[str, str]:
    """Environment of the cluster and of every process of a round: the mark, and a cache where there is none, so that
    what is compiled is compiled once.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {MARK: mark}
    return {
        MARK: mark,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _tidy(folder: Path, *, is_temporary: bool) -> None:
    """Where the user named no folder, removes what is of no use: the cache, and all of it if no round is kept."""
    if not is_temporary:
        return
    shutil.rmtree(folder / "compiled", ignore_errors=True)
    if {path.name for path in folder.iterdir()} <= {"undisturbed", "undisturbed.json"}:
        shutil.rmtree(folder, ignore_errors=True)


def _tell(command: Chaos, judgements: Sequence[Judgement], mark: str, *, seconds: float) -> int:
    from podembed.jobs.chaos.oracles import marked
    from podembed.jobs.chaos.table import as_json, render

    left = _gone(lambda: marked(f"{MARK}={mark}".encode()))
    print()
    print(render(judgements))
    is_met = all(judged.is_met for judged in judgements) and not left
    if left:
        print(f"Processes of the campaign that still live: {left}")
    # Of the rounds that were run: a campaign that was stopped leaves out the last ones.
    num_random = sum(judged.round.schedule.number == "random" for judged in judgements)
    seeds = [command.seed + at for at in range(num_random)]
    if seeds:
        print(f"Random schedules: seeds {seeds[0]} to {seeds[-1]}; one again with --rounds 1 --seed N")
    print(
        as_json(
            judgements, seconds=round(seconds, 1), seeds=seeds, processes_left=len(left), in_process=command.in_process
        )
    )
    return 0 if is_met else EXIT_NOT_MET


def _gone(find: Any, within_s: float = 20.0) -> list[int]:
    deadline_s = time.monotonic() + within_s
    while (left := find()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return left
