"""Processes that tests start, look for and wait for. Of a cluster only what this process started is found, so that
nothing else is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter


def actor_processes(kind: str) -> list[int]:
    """Process ids of this session's actors of one kind: descendants of this process whose title names it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(b"ray::_" + kind.encode()) and _is_descendant(int(entry.name)):
                found.append(int(entry.name))
    return sorted(found)


class Listeners(SilentReporter):
    """Looks once, while steps are done. `seen` has the addresses of the listening sockets of each worker process, and
    `processors` those that each of its threads may use.
    """

    def __init__(self) -> None:
        self.seen: dict[str, list[list[str]]] = {}
        self.processors: dict[str, list[set[frozenset[int]]]] = {}

    def window(self, report: WindowReport) -> None:
        if not self.seen:
            for kind in ("HostActor", "DeviceActor"):
                processes = actor_processes(kind)
                self.seen[kind] = [_listening(process) for process in processes]
                self.processors[kind] = [_processors(process) for process in processes]


def _listening(process: int) -> list[str]:
    return [c.laddr.ip for c in psutil.Process(process).net_connections("inet") if c.status == psutil.CONN_LISTEN]


def _processors(process: int) -> set[frozenset[int]]:
    found = set()
    for thread in os.listdir(f"/proc/{process}/task"):
        with contextlib.suppress(ProcessLookupError):
            found.add(frozenset(os.sched_getaffinity(int(thread))))
    return found


def _is_descendant(process: int) -> bool:
    while process > 1:
        if process == os.getpid():
            return True
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
    return False


def free_port() -> int:
    """A port of this machine's loopback address for a program that is told one; outside the range from which kernels
    give ports to whoever asks for any, so that no connection of another test gets it before that program listens.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_for(what: str, is_so: Callable[[], bool], *, seconds: float) -> float:
    """Seconds until it is so.

    Raises:
      AssertionError: it is not so in time.
    """
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() < began + seconds, f"no {what} within {seconds:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - began


RAY_WAS_LATE = "The current node timed out during startup"
"""Ray gives a node of a cluster half a minute to come up, and no setting changes that. One request may take as long on
a busy machine."""


def said_by(module: str, *arguments: str, timeout_s: float, environment: Mapping[str, str] | None = None) -> dict:
    """The line of JSON that a program of the tests prints, which must end well. It is started once more where Ray gave
    up a node before anything began.

    Args:
      module: whose `__main__` it is.
      environment: by default that of this process.

    Raises:
      AssertionError: it failed, or took longer. Says what it told last, and in which calls it was.
    """
    code, why, said, told = _ended(module, arguments, timeout_s, environment)
    if code and RAY_WAS_LATE in told:
        code, why, said, told = _ended(module, arguments, timeout_s, environment)
    assert code == 0, f"{why}:\n{told[-6000:]}"
    # Ray may say something before it and after it.
    return json.loads(next(line for line in said.splitlines() if line.startswith("{")))


def _ended(
    module: str, arguments: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None
) -> tuple[int, str, str, str]:
    """Exit code of the program, how it ended, and what it wrote to its two outputs."""
    # Files, since what the program has started may hold its ends of pipes when it is gone.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        program = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", module, *arguments],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdout=out,
            stderr=errors,
            text=True,
        )
        try:
            program.wait(timeout_s)
            why = f"{module} ended with {program.returncode}"
        except subprocess.TimeoutExpired:
            why = f"{module} stood still, or was not done within {timeout_s:.0f} s"
            _abort(program)
        return program.returncode, why, _text_of(out), _text_of(errors)


def _abort(program: subprocess.Popen[str]) -> None:
    """Has it write the calls of its threads, and ends it with all that it started."""
    started = psutil.Process(program.pid).children(recursive=True)
    program.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(60)
    program.kill()
    program.wait()
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _text_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
