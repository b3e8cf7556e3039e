"""`podembed chaos`: runs a job undisturbed, then again and again with faults injected, and says whether anything is
different at the end.

Here are its flags, the cluster that all rounds share, and the environment of their processes. What is injected is in
`jobs.chaos.schedule`, how a round runs in `chaos_round`, what must hold after it in `chaos_oracles`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podembed.jobs.built_in import BUILT_IN_JOBS, parse_settings
from podembed.jobs.search_path import current_folder, new_process
from podembed.version import version

if TYPE_CHECKING:
    from podembed.jobs.chaos.oracles import Judgement, Measure
    from podembed.jobs.chaos.round import Campaign
    from podembed.jobs.chaos.schedule import RunShape, Schedule

EXIT_NOT_MET = 1
MARK = "PODEMBED_CHAOS"
_SELECTOR = re.compile(r"F\d{1,2}(\.\d{1,2})?|all")


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Inject faults into a job of yours, or into a tiny one, and check that nothing is lost, doubled or different.

    Each round is a run of its own, supervised, with one schedule of faults; its end is compared with a run without
    faults. Exits with 0 if all oracles hold in every round. docs/operations.md tells how to read the table.
    """

    job: str | None = None
    """As for train; by default a tiny generated job of a few seconds."""
    set: tuple[str, ...] = ()
    """As for train."""
    only: str = ""
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
    """Where runs lie; by default a temporary folder, of which the rounds that are not met are kept. One that holds the
    undisturbed run of the same job already saves that run, and what was compiled; remove it when the code of the job
    has changed.
    """
    list: bool = False
    """Print the schedules and run none."""
    stop_after_s: float = float("inf")
    """Begin no further round when so many seconds have passed; those that were left out are named."""
    record: str | None = None
    """File in which to keep what was seen of each schedule, in place of what it said of it before; docs/faults.json is
    the project's own.
    """


def run(command: Chaos, *, command_line: Callable[[list[str]], None]) -> int:
    """Runs the rounds that are requested. Returns the exit code.

    Args:
      command: what to run.
      command_line: `podembed` as a function of its arguments, for rounds in forks of this process.

    Raises:
      ConfigurationError: flags that select nothing, or a job that cannot be used.
      FaultPlanError: `--plan` is no plan.
    """
    from podembed.jobs.chaos.schedule import RunShape

    num_hosts = 1 if command.in_process else command.hosts
    shape = RunShape(num_hosts=num_hosts, num_steps=command.steps, commit_every=command.checkpoint_every)
    schedules = _schedules(command, shape)
    if command.list:
        for schedule in schedules:
            print(f"{schedule.label:7s} {schedule.title}")
            for fault in schedule.faults:
                print(f"        {fault.describe()}")
        return 0
    started_s = time.monotonic()
    folder = Path(command.folder or tempfile.mkdtemp(prefix="podembed-chaos-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    # Before the cluster starts, whose processes inherit it, and before JAX is imported, which reads it then.
    os.environ.update(_inherited(mark, folder))
    from podembed.orchestrator.cluster.connection import cluster_address, connected

    try:
        with contextlib.ExitStack() as stack:
            environment = dict(os.environ)
            if not command.in_process:
                stack.enter_context(connected(max(num_hosts, *(schedule.hosts_after or 0 for schedule in schedules))))
                environment = dict(os.environ) | {"RAY_ADDRESS": cluster_address()}
            campaign = _campaign(command, shape, environment=environment, command_line=command_line)
            judgements = _rounds(command, campaign, schedules, folder, mark)
    finally:
        for name in _inherited(mark, folder):
            os.environ.pop(name, None)
        _tidy(folder, is_temporary=command.folder is None)
    return _tell(command, judgements, mark, seconds=time.monotonic() - started_s)


def _schedules(command: Chaos, shape: RunShape) -> list[Schedule]:
    """The requested ones, in the order in which they run.

    Raises:
      ConfigurationError: nothing is selected.
    """
    from podembed.jobs.chaos.schedule import Schedule, curated, drawn
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.workers.faults.plan import read_plan

    if command.plan is not None:
        faults = read_plan(command.plan).faults
        return [Schedule(number="plan", label="plan", title=command.plan, faults=faults)]
    chosen: list[Schedule] = []
    wanted = {part.strip() for part in command.only.split(",") if part.strip()}
    if unknown := [part for part in wanted if not _SELECTOR.fullmatch(part)]:
        raise ConfigurationError(f"Found --only {','.join(unknown)}. Expected numbers such as F1 or F6.3, or all.")
    if wanted or not command.rounds:
        known = [one for one in curated(shape) if not (command.in_process and one.needs_hosts)]
        chosen = [one for one in known if not wanted or not wanted.isdisjoint(("all", one.number, one.label))]
        if not chosen:
            numbers = ", ".join(dict.fromkeys(one.number for one in known))
            raise ConfigurationError(
                f"Found --only {command.only}. Expected some of {numbers}; docs/faults.md says where the others are "
                "shown."
            )
    return chosen + [drawn(command.seed + at, shape) for at in range(command.rounds)]


def _campaign(
    command: Chaos, shape: RunShape, *, environment: Mapping[str, str], command_line: Callable[[list[str]], None]
) -> Campaign:
    from podembed.jobs.chaos.jobs import DEFAULT_FOLDER
    from podembed.jobs.chaos.round import Campaign
    from podembed.jobs.synthetic import DEFAULT_FOLDER as SYNTHETIC_FOLDER
    from podembed.workers.job.job import JobReference

    settings: dict[str, Any] = dict(parse_settings(command.set))
    function = BUILT_IN_JOBS.get(command.job or "", command.job) or "podembed.jobs.chaos.jobs:tiny"
    if command.job in (None, "synthetic"):
        default = DEFAULT_FOLDER if command.job is None else SYNTHETIC_FOLDER
        settings["folder"] = str(Path(str(settings.get("folder", default))).absolute())
    job = JobReference(function=function, arguments=settings, folder=current_folder()).resolve()
    return Campaign(
        function=function,
        settings=settings,
        audit_rows=_audit_rows(job),
        shape=shape,
        program=tuple(new_process()),
        environment=environment,
        run_forked=_run_forked(job, command_line) if command.in_process else None,
        timeout_s=command.timeout_s,
    )


def _run_forked(job: Any, command_line: Callable[[list[str]], None]) -> Callable[[Sequence[str]], int]:
    """The command line as a function for forks; all that it imports and compiles for the job is loaded here, once."""
    from podembed.embedding.lookup.compiled import compile_kernels
    from podembed.workers.job.tables import choose_buckets, table_specs

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


def _audit_rows(job: Any) -> int | None:
    """Rows that an audit table needs: one for each sample, if the data names its samples."""
    from podembed.workers.input.reader import build_index

    return None if job.data.sample_id is None else build_index(job.resolved_data).num_rows


def _rounds(
    command: Chaos, campaign: Campaign, schedules: Sequence[Schedule], folder: Path, mark: str
) -> list[Judgement]:
    """The undisturbed run, then every schedule; says what came of each as soon as it is known, and keeps it with
    `--record`.
    """
    from podembed.jobs.chaos.oracles import judge
    from podembed.jobs.chaos.record import keep, seen
    from podembed.jobs.chaos.round import run_round
    from podembed.jobs.chaos.table import row

    measure = _measure(command, _undisturbed(campaign, folder), campaign, mark)
    judgements = []
    started_s = time.monotonic()
    for at, schedule in enumerate(schedules, 1):
        if time.monotonic() - started_s > command.stop_after_s:
            print(f"not run: {', '.join(one.label for one in schedules[at - 1 :])}", flush=True)
            break
        where = folder / f"{at:03d}-{schedule.label.replace(' ', '-')}"
        # One that was kept of an earlier campaign in this folder gives way.
        shutil.rmtree(where, ignore_errors=True)
        judged = judge(run_round(schedule, campaign, where), measure)
        judgements.append(judged)
        print(f"{at}/{len(schedules)}  " + "  ".join(row(judged)), flush=True)
        for complaint in judged.complaints:
            print(f"       {complaint}", flush=True)
        if command.record is not None and command.plan is None:
            day = time.strftime("%Y-%m-%d", time.gmtime())
            place = "one process" if command.in_process else "Ray"
            keep(Path(command.record), place, seen(judged, day=day, code=_code()))
        if judged.is_met:
            shutil.rmtree(where, ignore_errors=True)
    return judgements


def _code() -> str:
    """The commit of the checkout that runs, with `+` if files differ from it; or the version that is installed."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
            return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")
    return f"podembed {version()}"


def _undisturbed(campaign: Campaign, folder: Path) -> str:
    """Where the undisturbed run lies. One that lies in the folder already, of the same job in the same form, is used
    again.

    Raises:
      ConfigurationError: the job does not work even so.
    """
    from podembed.jobs.chaos.round import RUN_NAME, undisturbed
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.workers.storage.strict_json import canonical_bytes

    where, form = folder / "undisturbed", folder / "undisturbed.json"
    shape = [campaign.shape.num_hosts, campaign.shape.num_steps, campaign.shape.commit_every]
    wanted = canonical_bytes([campaign.function, dict(campaign.settings), shape, campaign.run_forked is None])
    if form.exists() and form.read_bytes() == wanted:
        print(f"undisturbed: that of {where}", flush=True)
        return str(where / RUN_NAME)
    shutil.rmtree(where, ignore_errors=True)
    first = undisturbed(campaign, where)
    if first.exit_code != 0:
        raise ConfigurationError(
            f"Found the undisturbed run ended with exit code {first.exit_code}. Expected 0: chaos begins with a job "
            "that works.\n"
            f"{first.output[-3000:]}"
        )
    form.write_bytes(wanted)
    print(f"undisturbed: {campaign.function}, {campaign.shape.num_steps} steps, {first.seconds:.1f} s", flush=True)
    return first.url


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
    """Environment of the cluster and of every process of a round: the mark, and a cache, so that what is compiled is
    compiled once.
    """
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
    print(as_json(judgements, seconds=round(seconds, 1), seeds=seeds, processes_left=len(left)))
    return 0 if is_met else EXIT_NOT_MET


def _gone(find: Any, within_s: float = 20.0) -> list[int]:
    deadline_s = time.monotonic() + within_s
    while (left := find()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return left
