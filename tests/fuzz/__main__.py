"""Fuzzing by coverage, with atheris: `python -m tests.fuzz [--seconds 60] [TARGET ...]`, or `make fuzz`.

Each target of `tests.fuzz.targets` runs in a process of its own for so many seconds. Python modules of the input side
are instrumented, so content that reaches new lines is kept and changed further, in `.fuzz/TARGET`; the next call goes
on from there. Compiled kernels cannot be looked into: two targets run them as plain Python instead. A content that
fails is left as `.fuzz/TARGET-crash-*`, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".fuzz"
TIMEOUT_S = 30
MOST_MB = 3_000
# Modules of numba kernels, whose changed bytecode numba would not compile.
KERNELS = [
    "podembed.workers.columns.column_kernels",
    "podembed.workers.columns.run_kernels",
    "podembed.workers.columns.string_keys",
    "podembed.embedding.hashing",
    "podembed.workers.input.lanes",
    "podembed.workers.checkpoint.digest",
]
SCANNERS = ["podembed.workers.formats.csv_records", "podembed.jobs.text.criteo_lines", "podembed.jobs.text.csv_lines"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all by default")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        fuzz(arguments.targets[0], arguments.seconds)
    from tests.fuzz.targets import TARGETS

    unknown = sorted(set(arguments.targets) - TARGETS.keys())
    if unknown:
        parser.error(f"Found {unknown}. Expected some of {sorted(TARGETS)}.")
    failed = []
    for name in arguments.targets or TARGETS:
        print(f"{name}: {arguments.seconds} s", flush=True)
        environment = os.environ | ({} if TARGETS[name].is_compiled else {"NUMBA_DISABLE_JIT": "1"})
        command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(arguments.seconds), "--inside"]
        ended = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
        lines = ended.stderr.splitlines()
        units = [line for line in lines if "number_of_executed_units" in line]
        print("\n".join(units if ended.returncode == 0 else lines[-40:]), flush=True)
        if ended.returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "nothing found", flush=True)
    return 1 if failed else 0


def fuzz(name: str, seconds: int) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    is_compiled = not os.environ.get("NUMBA_DISABLE_JIT")
    with atheris.instrument_imports(
        include=["workers", "jobs"], exclude=[*KERNELS, *(SCANNERS if is_compiled else [])]
    ):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus = FOLDER / name
    corpus.mkdir(parents=True, exist_ok=True)
    for at, seed in enumerate(target.seeds):
        (corpus / f"seed-{at}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MOST_MB}",
        "-print_final_stats=1",
    ]
    options += [f"-artifact_prefix={FOLDER}/{name}-", "-max_len=8192"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.call)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
