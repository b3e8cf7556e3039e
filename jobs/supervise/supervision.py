"""`supervise`: runs a command again until it is done or cannot be. It knows exit codes, not training.

Ray runs a submitted job once and a killed driver restarts nothing, so trying again belongs to somebody outside.
Attempts are made by a `Runner`: processes of this machine (`LocalRunner`), or Ray jobs
(`jobs.supervise.ray_jobs`).
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from podembed.jobs.outcomes import EXIT_INTERRUPTED
from podembed.jobs.supervise.driver_pulse import LOOK_EVERY_S, DriverPulse, DriverSigns, heartbeat_of
from podembed.orchestrator.api.run_errors import EXIT_CONFIGURATION, EXIT_FENCED, EXIT_STOPPED, EXIT_USER_ERROR
from podembed.orchestrator.api.signals import StopSignals
from podembed.orchestrator.commit.holder import Holder
from podembed.workers.liveness.process_statistics import read_statistics
from podembed.workers.liveness.progress import machine_identity

EXIT_USAGE = 2
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0
POLL_S = 0.1
BETWEEN_SIGNALS_S = 0.5


class Runner(Protocol):
    """How attempts are made."""

    @property
    def was_stopped_by_others(self) -> bool:
        """Whether somebody else than the supervisor has told the attempt to stop, by a way that is meant for that."""
        ...

    def start(self, arguments: Sequence[str], attempt: int) -> None:
        """Begins an attempt, without waiting; `attempt` counts from 1."""
        ...

    def poll(self) -> int | None:
        """The exit code of the attempt, None while it goes on; negative for a signal, as `subprocess` has it."""
        ...

    def stop(self) -> None:
        """Passes on a request to stop; the second time means now."""
        ...

    def kill(self) -> None:
        """Ends the attempt without asking it."""
        ...

    def look(self, url: str) -> DriverSigns:
        """What can be seen of the attempt's driver, which drives the run in `url`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """All steps are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Trying again would not help. `why` is one line."""

    exit_code: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Try again after `delay_s`. `failures`: faults in a row so far, this one included if it counts."""

    delay_s: float
    failures: int
    why: str


_FINAL = {
    EXIT_USER_ERROR: "the job's own error would come again",
    EXIT_USAGE: "the command line is wrong",
    EXIT_FENCED: "another driver has the run",
    EXIT_CONFIGURATION: "the configuration cannot work",
    EXIT_INTERRUPTED: "it was interrupted",
}


def after_exit(
    exit_code: int, *, failures: int, max_failures: int, is_stopping: bool, has_left: bool = True
) -> Done | Stop | Again:
    """What follows an attempt.

    Args:
      exit_code: exit code of the attempt; negative for a signal.
      failures: faults in a row before this attempt.
      max_failures: number of failures in a row that are tolerated.
      is_stopping: whether the supervisor itself was asked to stop.
      has_left: whether the driver ended by itself: it gives its lease back, whatever it ends with.
    """
    if exit_code == 0:
        return Done()
    if is_stopping:
        return Stop(exit_code=exit_code, why="asked to stop")
    # Where the Ray cluster is lost, Ray ends the driver's process with code 1 from within.
    is_cut_short = exit_code == EXIT_USER_ERROR and not has_left
    if exit_code in _FINAL and not is_cut_short:
        return Stop(exit_code=exit_code, why=_FINAL[exit_code])
    if exit_code == EXIT_STOPPED:
        # It committed and left because its machine was to go: no fault of the job.
        return Again(delay_s=FIRST_DELAY_S, failures=failures, why="preempted after a commit")
    cause = f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    if is_cut_short:
        cause += " in the middle of its work, as when the Ray cluster is lost"
    if failures + 1 > max_failures:
        return Stop(exit_code=exit_code, why=f"{cause}; that was failure {failures + 1} in a row")
    delay_s = min(FIRST_DELAY_S * 2**failures, LONGEST_DELAY_S)
    return Again(delay_s=delay_s, failures=failures + 1, why=cause)


def supervise(
    runner: Runner,
    *,
    first: Sequence[str],
    later: Sequence[str],
    max_failures: int,
    progress: Callable[[], str | None],
    notice: Callable[[str], None],
    stop: StopSignals,
    url: str | None = None,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Makes attempts until one is done or no other one can help. Returns the exit code of the last.

    Args:
      first, later: arguments of the first attempt and of those after it.
      max_failures: faults in a row, without new progress in between.
      progress: something that changes when a commit was made, None if that cannot be known.
      stop: asked whether somebody wants the supervisor to end; the request is passed on to the attempt.
      url: folder of the run, in which a driver that is frozen stops to write its heartbeat; None looks for none.
    """
    attempt = failures = 0
    seen = progress()
    while True:
        attempt += 1
        runner.start(first if attempt == 1 else later, attempt)
        exit_code = _await(runner, stop, sleep, frozen=_frozen(runner, url, clock_s), notice=notice)
        reached = progress()
        if reached != seen:
            seen, failures = reached, 0
        is_stopping = stop.reason is not None or runner.was_stopped_by_others
        decision = after_exit(
            exit_code,
            failures=failures,
            max_failures=max_failures,
            is_stopping=is_stopping,
            has_left=url is None or runner.look(url).heartbeat is None,
        )
        match decision:
            case Done():
                return 0
            case Stop():
                notice(f"attempt {attempt}: {decision.why}; not tried again")
                if stop.reason is not None and exit_code == -signal.SIGTERM:
                    # Told to end before its interpreter had come to our code, or as it left.
                    return EXIT_STOPPED
                return exit_code if exit_code >= 0 else 128 - exit_code
            case Again():
                failures = decision.failures
                notice(f"attempt {attempt}: {decision.why}; the next one begins in {decision.delay_s:.0f} s")
                ends_s = clock_s() + decision.delay_s
                while clock_s() < ends_s:
                    if stop.reason is not None:
                        notice("asked to stop; no other attempt begins")
                        return EXIT_STOPPED
                    sleep(POLL_S)


def _frozen(runner: Runner, url: str | None, clock_s: Callable[[], float]) -> Callable[[], str | None]:
    """Asked often, looks every few seconds: why the attempt's driver is to be killed, or None."""
    pulse, next_s = DriverPulse(), clock_s() + LOOK_EVERY_S

    def look() -> str | None:
        nonlocal next_s
        now_s = clock_s()
        if url is None or now_s < next_s:
            return None
        next_s = now_s + LOOK_EVERY_S
        return pulse.see(runner.look(url), now_s)

    return look


def _await(
    runner: Runner,
    stop: StopSignals,
    sleep: Callable[[float], None],
    *,
    frozen: Callable[[], str | None],
    notice: Callable[[str], None],
) -> int:
    is_told = False
    try:
        while (exit_code := runner.poll()) is None:
            if stop.reason is not None and not is_told:
                is_told = True
                runner.stop()
            if (why := frozen()) is not None:
                notice(f"{why}; it is killed")
                runner.kill()
            sleep(POLL_S)
        return exit_code
    except KeyboardInterrupt:
        return _end_now(runner, sleep, is_told=is_told)


def _end_now(runner: Runner, sleep: Callable[[float], None], *, is_told: bool) -> int:
    """Ends the attempt at a second request, and kills it at a third. Its exit code still counts."""
    try:
        if not is_told:
            runner.stop()
            # Two signals at once may arrive as one.
            sleep(BETWEEN_SIGNALS_S)
        runner.stop()
        return _awaited(runner, sleep)
    except KeyboardInterrupt:
        runner.kill()
        return _awaited(runner, sleep)


def _awaited(runner: Runner, sleep: Callable[[float], None]) -> int:
    while (exit_code := runner.poll()) is None:
        sleep(POLL_S)
    return exit_code


class LocalRunner:
    """Attempts as child processes, in a session of their own, so that a terminal's Ctrl-C reaches them through the
    supervisor alone.

    Args:
      program: the command line before the arguments.
    """

    was_stopped_by_others = False  # the sender of a signal is unknown

    def __init__(self, program: Sequence[str]) -> None:
        self._program = tuple(program)
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], attempt: int) -> None:
        self._child = subprocess.Popen([*self._program, *arguments], start_new_session=True)

    def poll(self) -> int | None:
        return self._running.poll()

    def stop(self) -> None:
        self._running.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        # A child that has not been waited for keeps its number, so this is our process and no other.
        self._running.kill()

    def look(self, url: str) -> DriverSigns:
        return look_at_child(url, self._running.pid)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise RuntimeError("No attempt was started. Expected start first.")
        return self._child


def look_at_child(url: str, process: int) -> DriverSigns:
    """What can be seen of a driver that is a process of this machine."""

    def is_ours(holder: Holder) -> bool:
        return (holder.process, holder.machine) == (process, machine_identity())

    return DriverSigns(heartbeat=heartbeat_of(url, is_ours), statistics=read_statistics(process))
