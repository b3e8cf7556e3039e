"""Runs another program's command and ours in turn and prints the ratio ours / theirs with its spread, as one JSON line.

    python benchmarks/compare.py --rounds 3 \\
        --theirs "venv/bin/python peer.py --bench A --seconds 10" --theirs-folder ../peers \\
        --ours "python benchmarks/dlrm.py --bench A --seconds 10"

Both commands print one JSON object in their last line of output with `samples_per_s` and `samples_per_cpu_s`. Other
load on the machine changes in the course of minutes, so only runs that follow each other are compared. The median of
these ratios is what counts.

A round is *quiet* if both commands say that at least three of their windows were (`quiet_windows`): other processes
used less than 0.2 CPUs. Ratios of `samples_per_s` come from quiet rounds alone, if there are any. CPU seconds suffer
less from other programs, so all rounds count there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any

METRICS = ("samples_per_s", "samples_per_cpu_s")
MIN_QUIET_WINDOWS = 3


def run(command: str, folder: str | None, timeout_s: float) -> dict[str, Any]:
    """The JSON object in the last line that the command prints.

    Raises:
      RuntimeError: the command failed or printed something else.
    """
    done = subprocess.run(
        shlex.split(command), cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise RuntimeError(
            f"Found exit status {done.returncode} and {len(lines)} JSON lines from `{command}`. Expected status 0 and "
            "at least one. "
            f"Its last words:\n{tail}"
        )
    return json.loads(lines[-1])


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theirs", required=True, help="command line, without a shell")
    parser.add_argument("--theirs-folder", default=None, help="folder to run it in")
    parser.add_argument("--ours", required=True, help="command line, run in this folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one run")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"theirs": [], "ours": []}
    for number in range(arguments.rounds):
        # Who begins changes from round to round, so that a machine that gets busier favours neither.
        order = ("theirs", "ours") if number % 2 == 0 else ("ours", "theirs")
        for who in order:
            folder = arguments.theirs_folder if who == "theirs" else None
            found[who].append(run(getattr(arguments, who), folder, arguments.timeout_s))
            shown = {metric: found[who][-1].get(metric) for metric in (*METRICS, "quiet_windows")}
            print(who, shown, file=sys.stderr, flush=True)
    result: dict[str, Any] = {"benchmark": "compare", "ours": arguments.ours, "theirs": arguments.theirs}
    pairs = list(zip(found["ours"], found["theirs"], strict=True))
    quiet = [pair for pair in pairs if all(one.get("quiet_windows", 0) >= MIN_QUIET_WINDOWS for one in pair)]
    result |= {"rounds": len(pairs), "quiet_rounds": len(quiet)}
    for metric in METRICS:
        counted = quiet if quiet and metric == "samples_per_s" else pairs
        result[f"{metric}_ratio"] = spread([ours[metric] / theirs[metric] for ours, theirs in counted])
        for who, runs in found.items():
            result[f"{who}_{metric}"] = [one[metric] for one in runs]
    result["load1"] = round(os.getloadavg()[0], 2)
    result["date"] = time.strftime("%Y-%m-%d")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
