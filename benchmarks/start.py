"""From the command to the first step of training, on hosts of this machine. Prints one JSON line.

    python benchmarks/start.py --hosts 2 --rounds 3
    python benchmarks/start.py --theirs ../before --rounds 5

Each round is `podembed train` of the built-in job as a user types it, in a process of its own, until it prints its
first step. A first start is not counted: it makes the data and fills the caches of compiled programs and kernels.
`cpu_s` is the processor time of all processes of the command by then. With `--theirs`, the program in that folder, with
its own environment, starts in turn with this one. `ratio` is ours by theirs, the median over pairs that follow each
other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
FIRST_STEP = re.compile(rb"^step +\d+/")
MARK = "PODEMBED_BENCHMARK_START"
TIMEOUT_S = 300.0


def start(program: Path, num_hosts: int, more: list[str]) -> dict[str, float]:
    """Seconds and processor seconds of one start."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as storage:
        command = [program / ".venv/bin/podembed", "train", "--job", "synthetic", "--hosts", str(num_hosts)]
        command += ["--threads-per-host", "1", "--max-steps", "50", "--storage", storage, *more]
        began_s = time.monotonic()
        process = subprocess.Popen(
            command, cwd=program, env=os.environ | {MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        try:
            seen = any(FIRST_STEP.match(line) for line in process.stdout)
            seconds, cpu_s = time.monotonic() - began_s, processor_s(mark)
            process.stdout.read()
        finally:
            if process.poll() is None and time.monotonic() - began_s > TIMEOUT_S:
                process.send_signal(signal.SIGTERM)
            status = process.wait()
    if not seen or status != 0:
        raise RuntimeError(f"Found exit status {status} of {program}. Expected 0, and a step. Type the command there.")
    return {"seconds": seconds, "cpu_s": cpu_s}


def processor_s(mark: str) -> float:
    """Of all processes that inherited a mark and live."""
    total = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                used = process.cpu_times()
                total += used.user + used.system
        except psutil.Error:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--theirs", type=Path, help="folder of another copy of the program, with its .venv")
    parser.add_argument("--set", nargs="*", default=[], help="arguments of the job, as for podembed train")
    arguments = parser.parse_args()
    programs = {"ours": ROOT} | ({"theirs": arguments.theirs.resolve()} if arguments.theirs else {})
    more = ["--set", *arguments.set] if arguments.set else []
    found: dict[str, list[dict[str, float]]] = {who: [] for who in programs}
    for program in programs.values():
        start(program, arguments.hosts, more)
    for number in range(arguments.rounds):
        for who in sorted(programs, reverse=number % 2 == 1):
            found[who].append(start(programs[who], arguments.hosts, more))
            print(who, found[who][-1], file=sys.stderr, flush=True)
    result: dict[str, object] = {"benchmark": "start", "hosts": arguments.hosts, "rounds": arguments.rounds}
    for who, rounds in found.items():
        result[who] = {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}
    if "theirs" in found:
        pairs = list(zip(found["ours"], found["theirs"], strict=True))
        result["ratio"] = {
            name: round(statistics.median(ours[name] / theirs[name] for ours, theirs in pairs), 3)
            for name in ("seconds", "cpu_s")
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
