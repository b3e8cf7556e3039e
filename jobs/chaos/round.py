"""One round of `podembed chaos`: a run of its own, supervised, with the faults of one schedule, and what was seen of
it.

The run is the program that a user would start, `podembed train`, on a cluster that is there already. The supervisor
starts it again until it is done. This module starts it and looks at its folder while it runs. It wakes what was frozen,
starts a second driver, and ends what takes too long. Afterwards it reads the plan's records, the driver's events and
the exit codes. It judges nothing: see `jobs.chaos.oracles`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podembed.jobs.chaos.plan_file import plan_bytes, read_records
from podembed.jobs.chaos.schedule import RunShape, Schedule
from podembed.jobs.command_signals import COMMAND_SIGNALS
from podembed.jobs.event_log import LoggedEvent, read_events
from podembed.jobs.supervise.driver_pulse import DriverSigns
from podembed.jobs.supervise.supervision import look_at_child, supervise
from podembed.orchestrator.api.run_errors import EXIT_STOPPED
from podembed.orchestrator.api.signals import StopSignals
from podembed.orchestrator.commit.lease_files import read_head
from podembed.workers.faults.inject import FaultRecord
from podembed.workers.faults.plan import FaultPlan
from podembed.workers.liveness.process_statistics import read_statistics
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store

RUN_NAME = "run"
LOOK_S = 0.1
MAX_ATTEMPTS_IN_A_ROW = 5
KEEP_ALL = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What all rounds have in common.

    Attributes:
      function, settings: the job, as `JobReference` has them.
      audit_rows: rows of the audit table; None for a job whose samples have no ids.
      program: command line before the arguments of `podembed`.
      environment: environment of the processes.
      run_forked: runs one host in the driver's own process, without Ray, in a fork of this one. It takes the arguments
        of `podembed` and returns the exit code. None runs `program`. A fork has everything imported, so an attempt
        costs a second and not ten.
      timeout_s: longest time for a round.
    """

    function: str
    settings: Mapping[str, object]
    audit_rows: int | None
    shape: RunShape
    program: Sequence[str]
    environment: Mapping[str, str]
    run_forked: Callable[[Sequence[str]], int] | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What was seen of one round.

    Attributes:
      url: the run's folder.
      exit_code: exit code of the supervised run, after its last attempt; None if it took too long and was ended.
      attempts: processes that were started, drivers of a planned change counted in.
      output: all that the run printed, the supervisor's words included.
    """

    schedule: Schedule
    url: str
    folder: str
    exit_code: int | None
    rival_exit_code: int | None
    attempts: int
    seconds: float
    events: Sequence[LoggedEvent]
    records: Sequence[FaultRecord]
    output: str


def run_round(schedule: Schedule, campaign: Campaign, folder: Path) -> Round:
    """Runs one schedule in an empty folder, to its end."""
    return _Rounds(schedule, campaign, folder).run()


class _Rounds:
    """One round under way. Mutated: the notes, what was woken, and the rival."""

    def __init__(self, schedule: Schedule, campaign: Campaign, folder: Path) -> None:
        self._schedule = schedule
        self._campaign = campaign
        self._folder = folder
        self._log = folder / "output.txt"
        self._plan = folder / "plan.json"
        self._url = str(folder / RUN_NAME)
        self._woken: set[tuple[int, int]] = set()
        self._rival: LoggedRunner | None = None
        self._rival_exit: int | None = None
        self._runner = LoggedRunner(campaign, self._log)

    def run(self) -> Round:
        self._folder.mkdir(parents=True)
        plan = FaultPlan(folder=str(self._folder), faults=self._schedule.faults)
        self._plan.write_bytes(plan_bytes(plan))
        started_s = time.monotonic()
        first = self._train(self._campaign.shape.num_hosts)
        later = [*first, "--resume"]
        deadline_s = started_s + self._campaign.timeout_s
        exit_code = None
        with contextlib.suppress(TimeoutError):
            exit_code = self._supervised(first, later, deadline_s)
        self._end_rival()
        return Round(
            schedule=self._schedule,
            url=self._url,
            folder=str(self._folder),
            exit_code=exit_code,
            rival_exit_code=self._rival_exit,
            attempts=self._runner.attempts,
            seconds=time.monotonic() - started_s,
            events=read_events(str(self._folder)),
            records=read_records(str(self._folder)),
            output=self._log.read_text(encoding="utf-8", errors="replace"),
        )

    def _train(self, num_hosts: int) -> list[str]:
        campaign, schedule = self._campaign, self._schedule
        settings = {**campaign.settings, **schedule.settings}
        flags = list(schedule.flags)
        if "--keep" not in flags:
            flags += ["--keep", str(KEEP_ALL)]
        return [
            "train",
            *("--job", "podembed.jobs.chaos.jobs:audited"),
            *("--set", f"function={json.dumps(campaign.function)}", f"arguments={json.dumps(settings)}"),
            f"num_rows={json.dumps(campaign.audit_rows)}",
            *(("--in-process",) if campaign.run_forked else ("--hosts", str(num_hosts), "--threads-per-host", "1")),
            *("--name", RUN_NAME, "--storage", str(self._folder)),
            *("--checkpoint-every", str(campaign.shape.commit_every), "--max-steps", str(campaign.shape.num_steps)),
            *("--fault-plan", str(self._plan)),
            *flags,
        ]

    def _supervised(self, first: Sequence[str], later: Sequence[str], deadline_s: float) -> int:
        """Attempts until the end; with a planned change, those after the first that was stopped have the other number
        of hosts.
        """
        hosts_after = self._schedule.hosts_after
        if hosts_after is not None:
            changed = [*self._train(hosts_after), "--resume"]
            self._runner.replace_later = lambda: changed
        exit_code = supervise(
            self._runner,
            first=first,
            later=later,
            max_failures=MAX_ATTEMPTS_IN_A_ROW,
            progress=self._newest_commit,
            notice=self._note,
            stop=StopSignals(),
            url=self._url,
            sleep=lambda seconds: self._watch(seconds, deadline_s),
        )
        if COMMAND_SIGNALS.exit_code is not None:
            # The supervisor has passed it on to the attempt. It ends the rounds, too.
            raise KeyboardInterrupt
        return exit_code

    def _newest_commit(self) -> str | None:
        try:
            return read_head(Store(self._url))
        except (StorageError, OSError, ValueError):
            return None

    def _note(self, text: str) -> None:
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(f"supervise: {text}\n")

    # ------------------------------------------------------------------ while it runs

    def _watch(self, seconds: float, deadline_s: float) -> None:
        """Sleeps, and does what is due.

        Raises:
          TimeoutError: the round takes too long; its process has been ended.
        """
        time.sleep(seconds)
        records = read_records(str(self._folder))
        for record in records:
            self._wake(record)
        if self._schedule.rival is not None and records and self._rival is None:
            self._rival = self._start_rival()
        if time.monotonic() > deadline_s:
            self._runner.kill()
            raise TimeoutError(f"The round took longer than {self._campaign.timeout_s:.0f} s.")

    def _wake(self, record: FaultRecord) -> None:
        key = (record.fault, record.strike)
        if record.action != "stop" or key in self._woken:
            return
        wake_s = self._schedule.faults[record.fault].arguments.get("wake_s")
        if wake_s is not None and time.time() - record.unix_s >= float(wake_s):
            self._woken.add(key)
            # It may be gone by now, which is the expected end.
            if _is_stopped(record.process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.process, signal.SIGCONT)
                self._note(f"woke process {record.process}")

    def _start_rival(self) -> LoggedRunner:
        if self._schedule.rival == "takes_over":
            arguments = [*self._train(self._campaign.shape.num_hosts), "--resume"]
        else:
            shape = self._campaign.shape
            hosts = ("--in-process",) if self._campaign.run_forked else ("--hosts", str(shape.num_hosts))
            arguments = ["resume", self._url, *hosts]
        rival = LoggedRunner(self._campaign, self._log)
        rival.start(arguments, 1)
        return rival

    def _end_rival(self) -> None:
        if self._rival is None:
            return
        deadline_s = time.monotonic() + self._campaign.timeout_s
        while self._rival.poll() is None and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        self._rival_exit = self._rival.poll()
        self._rival.kill()


class LoggedRunner:
    """Attempts as child processes, each in a session of its own, whose words go to a file.

    Attributes:
      attempts: how many were started.
      replace_later: gives the arguments of attempts that follow one which was stopped.
    """

    was_stopped_by_others = False

    def __init__(self, campaign: Campaign, log: Path) -> None:
        self.attempts = 0
        self.replace_later: Callable[[], Sequence[str]] | None = None
        self._campaign = campaign
        self._log = log
        self._child: int | None = None
        self._last_exit: int | None = None
        self._is_changed = False

    def start(self, arguments: Sequence[str], attempt: int) -> None:
        if self.replace_later is not None and (self._is_changed or self._last_exit == EXIT_STOPPED):
            self._is_changed = True
            arguments = self.replace_later()
        self.attempts += 1
        self._last_exit = None
        run_forked = self._campaign.run_forked
        with open(self._log, "ab") as log:
            if run_forked is None:
                self._child = _spawned([*self._campaign.program, *arguments], self._campaign.environment, log.fileno())
            else:
                self._child = _forked(lambda: run_forked(arguments), log.fileno())

    def poll(self) -> int | None:
        if self._child is None:
            return self._last_exit
        found, status = os.waitpid(self._child, os.WNOHANG)
        if found:
            self._child, self._last_exit = None, os.waitstatus_to_exitcode(status)
        return self._last_exit

    def stop(self) -> None:
        if self._child is not None:
            os.kill(self._child, signal.SIGTERM)

    def look(self, url: str) -> DriverSigns:
        return DriverSigns(heartbeat=None, statistics=None) if self._child is None else look_at_child(url, self._child)

    def kill(self) -> None:
        """Ends the attempt at once, and waits for it."""
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            _, status = os.waitpid(self._child, 0)
            self._child, self._last_exit = None, os.waitstatus_to_exitcode(status)


def _spawned(command: Sequence[str], environment: Mapping[str, str], log: int) -> int:
    """Starts a program; its process id. It is waited for by number, as a fork is."""
    actions = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    return os.posix_spawn(command[0], [*command], dict(environment), file_actions=actions, setsid=True)


def _forked(run: Callable[[], int], log: int) -> int:
    """Runs a function in a fork of this process, which has no threads of its own; the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: what is above on the stack belongs to the parent.
        os._exit(code)


def undisturbed(campaign: Campaign, folder: Path) -> Round:
    """The same run without faults, which others are compared with."""
    return run_round(replace(_NOTHING), campaign, folder)


_NOTHING = Schedule(number="", title="undisturbed", faults=())


def _is_stopped(process: int) -> bool:
    found = read_statistics(process)
    return found is not None and found.state in "Tt"
