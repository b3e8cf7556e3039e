"""Sends SIGTERM and Ctrl-C to the program at many moments of its start, to the driver alone and to its process group,
and judges how it ends: with a sentence that names the signal, and a code of docs/operations.md.

Usage: python -m tests.faults.signal_sweep [--every 0.1] [--until 30] [--ways console module supervise]

Whatever comes before the interpreter reaches our code is the kernel's business. These moments are counted apart.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from podembed.orchestrator.api.run_errors import EXIT_STOPPED
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]
CONSOLE = [str(Path(sys.executable).with_name("podembed"))]
MODULE = [sys.executable, "-m", "podembed"]
PATIENCE_S = 120.0
WAYS = {"console": CONSOLE, "module": MODULE, "supervise": [*MODULE, "supervise", "--"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a program ended that got a signal.

    Attributes:
      was_caught: whether the program had a handler of its own by then.
      is_over: whether it was over before.
      seconds: from the signal to the end.
    """

    code: int
    output: str
    was_caught: bool
    is_over: bool
    seconds: float


def catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def sent(
    command: Sequence[str], number: signal.Signals, *, after_s: float, to_group: bool, once_caught: bool = False
) -> End:
    """Starts a program in a session of its own, sends it a signal and waits for its end.

    Args:
      after_s: seconds after its start; with `once_caught` after it has set its handlers.
    """
    program = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # What a shell begins in the background ignores Ctrl-C, and so does what that begins.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        if once_caught:
            # Python itself has a handler for SIGINT as soon as it runs.
            wait_for("handlers", lambda: catches(program.pid, signal.SIGTERM), seconds=PATIENCE_S)
        time.sleep(after_s)
        is_over, was_caught, sent_s = program.poll() is not None, True, time.monotonic()
        if not is_over:
            was_caught = catches(program.pid, signal.SIGTERM)
            (os.killpg if to_group else os.kill)(program.pid, number)
        output, _ = program.communicate(timeout=PATIENCE_S)
        seconds = time.monotonic() - sent_s
        return End(code=program.returncode, output=output, was_caught=was_caught, is_over=is_over, seconds=seconds)
    finally:
        if program.poll() is None:
            program.kill()
            program.communicate()


def fault_of(end: End, number: signal.Signals) -> str | None:
    """What is wrong with the end of a `train` that got a signal once; None if nothing is."""
    if end.code == 0:
        return None
    if end.code != EXIT_STOPPED:
        return f"exit code {end.code}"
    if number.name not in end.output:
        return "no sentence"
    return "a traceback" if "Traceback" in end.output else None


def training(storage: str, *arguments: str) -> list[str]:
    """The arguments of a run of some seconds that has all of a start: data to generate, Ray, a compiled model."""
    return ["train", *arguments, "--storage", storage, "--checkpoint-every", "100", "--max-steps", "200"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=float, default=0.1)
    parser.add_argument("--begin", type=float, default=0.0)
    parser.add_argument("--until", type=float, default=30.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--in-process", action="store_true")
    options = parser.parse_args()
    hosts = ["--in-process"] if options.in_process else ["--hosts", str(options.hosts)]
    counts: Counter[str] = Counter()
    for after_s in np.arange(options.begin, options.until, options.every):
        for way in options.ways:
            for number in (signal.SIGTERM, signal.SIGINT):
                for to_group in (False, True):
                    with tempfile.TemporaryDirectory() as storage:
                        arguments = training(storage, *hosts)
                        end = sent([*WAYS[way], *arguments], number, after_s=float(after_s), to_group=to_group)
                    fault = fault_of(end, number)
                    if end.is_over:
                        what = "over before"
                    elif not end.was_caught:
                        what = "before our code"
                    else:
                        what = fault or f"{end.code} with a sentence" if end.code else "done"
                    is_wrong = fault is not None and end.was_caught
                    counts["WRONG" if is_wrong else what] += 1
                    who = "group" if to_group else "driver"
                    print(f"{after_s:6.1f} s  {way:9} {number.name} to the {who}: {what}, in {end.seconds:.1f} s")
                    if is_wrong:
                        print(end.output[-2000:])
                    sys.stdout.flush()
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
