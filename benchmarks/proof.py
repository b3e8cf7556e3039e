"""What must not move while code does: runs this and prints a line for each thing that differs from a recorded file.

    python benchmarks/proof.py --only digests step --against benchmarks/proof.json
    python benchmarks/proof.py --record FILE
    python benchmarks/proof.py --only pairs --pairs-with ../before

Parts, of which `--only` chooses some; without it all run, `pairs` where `--pairs-with` names another checkout:

* `digests`: the newest commits of small runs, bit by bit: the synthetic job on 1, 2 and 3 hosts, undisturbed and with a
  host process killed in the middle, and jobs with sequences, candidates, tables on devices, and batch normalization.
* `simulate`: what `make simulate` counts.
* `conformance`: how many tests of the conformance suites passed.
* `pairs`: the workloads A, B, C and C2 in turn with the other checkout, by `benchmarks/compare.py`.
* `step`: files and functions that a steady step passes, by `benchmarks/step_trace.py`.
* `lines`: of the core, the product and the tests, and public class names with more than one meaning.

Exits with 1 if a byte moved, something failed, a workload is more than 3 % slower, or a count of `step` or `lines`
grew. Bytes depend on the processor and on versions of libraries, so they are not compared with those of others.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import papers
from podembed import (
    CheckpointConfig,
    FeatureConfig,
    JobConfig,
    JobReference,
    Result,
    RunConfig,
    ScalingConfig,
    SilentReporter,
    TableConfig,
    Trainer,
    WindowReport,
)
from podembed.orchestrator.cluster.connection import connected
from tests.processes import actor_processes
from tests.run_state import committed_state

ROOT = Path(__file__).resolve().parents[1]
NUM_STEPS, COMMIT_EVERY, KILL_AT_STEP = 60, 20, 20
KILL_DELAY_S = 0.05  # so that a step is under way
ON_DEVICES_BELOW = 5_000
MOST_SLOWER = 0.03
FLOORS = ("embedding", "workers", "orchestrator", "jobs", "serving", "tools")
# What is no part of the core, in folders of its own and where it lay before.
ANNEXES = (
    *(f"embedding/{name}/" for name in ("tf", "tpu_embedding", "tpu_config", "keras", "replicas", "engine")),
    *(f"workers/{name}/" for name in ("stepwise", "inference")),
    *(f"orchestrator/{name}/" for name in ("fsck", "inspect", "report", "live", "health", "tracing", "sparsecore")),
    *(f"orchestrator/{name}" for name in ("inference/", "stepwise/", "pod", "request_thread.py", "strategy.py")),
)
PAIRS = {"A": "", "B": "", "C": "", "C2": " --placement buckets"}
IS_WORSE_MORE = ("step", "lines")

Found = dict[str, Any]


class Killer(SilentReporter):
    """Kills a host process once, while a window after step `KILL_AT_STEP` is under way."""

    def __init__(self) -> None:
        self.killed = 0

    def window(self, report: WindowReport) -> None:
        if not self.killed and report.step >= KILL_AT_STEP:
            self.killed = actor_processes("HostActor")[-1]
            threading.Timer(KILL_DELAY_S, os.kill, (self.killed, signal.SIGKILL)).start()


def synthetic(data: Path) -> JobReference:
    # Where `make train` has it, too.
    where = {"folder": str(ROOT / ".data" / "criteo-synthetic")}
    return JobReference(function="podembed.jobs.criteo:synthetic", arguments=where)


def on_devices(data: Path) -> JobConfig:
    """The same job with its small tables on devices."""
    job = synthetic(data).resolve()

    def placed(table: TableConfig) -> TableConfig:
        place = "device" if table.vocabulary_size < ON_DEVICES_BELOW else "host"
        return TableConfig(
            table.vocabulary_size, table.dim, table.initializer, combiner=table.combiner, name=table.name, place=place
        )

    return replace(job, features={name: FeatureConfig(placed(one.table)) for name, one in job.features.items()})


def of_paper(name: str) -> Callable[[Path], JobReference]:
    return lambda data: papers.reference(name, data)


# The job, on how many hosts, and whether one of them is killed.
RUNS: dict[str, tuple[Callable[[Path], JobReference | JobConfig], int, bool]] = {
    **{
        f"synthetic on {hosts}{', killed' if is_killed else ''}": (synthetic, hosts, is_killed)
        for hosts in (1, 2, 3)
        for is_killed in (False, True)
    },
    "sequences": (of_paper("sasrec"), 2, False),
    "candidates": (of_paper("bpr"), 2, False),
    "device tables": (on_devices, 2, False),
    "batch norm": (of_paper("deepfm"), 2, False),
}


def trained(job: JobReference | JobConfig, folder: Path, *, hosts: int, is_killed: bool) -> Result:
    reporter = Killer() if is_killed else SilentReporter()
    result = Trainer(
        job,
        scaling_config=ScalingConfig(num_hosts=hosts, threads_per_host=1),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder),
            max_steps=NUM_STEPS,
            checkpoint_config=CheckpointConfig(every_steps=COMMIT_EVERY),
        ),
        reporter=reporter,
    ).fit()
    if result.stopped_by is not None or bool(result.recoveries) != is_killed:
        raise SystemExit(
            f"Found {result.recoveries} and stopped_by={result.stopped_by}. Expected {int(is_killed)} kills."
        )
    return result


def digests_of(result: Result) -> dict[str, str]:
    """Of the newest commit's tables, slots and dense parameters, and of all losses and figures."""
    hashes = defaultdict(hashlib.sha256)
    for name, values in sorted(committed_state(result.path).items()):
        last = name.rpartition("/")[2]
        kind = "dense" if name.startswith("dense/") else "tables" if last == "rows" else "slots"
        hashes[kind].update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    hashes["losses"].update(json.dumps(sorted(result.losses.items())).encode())
    hashes["figures"].update(json.dumps([[one.step, one.values] for one in result.evaluations]).encode())
    return {kind: made.hexdigest()[:16] for kind, made in hashes.items()}


def digests(given: argparse.Namespace) -> Found:
    """Per run, a digest of each kind."""
    found = {}
    with tempfile.TemporaryDirectory() as name, connected(num_hosts=3):
        folder = Path(name)
        papers.write_data(folder / "data")
        for at, (run, (job, hosts, is_killed)) in enumerate(RUNS.items()):
            began_s = time.perf_counter()
            result = trained(job(folder / "data"), folder / str(at), hosts=hosts, is_killed=is_killed)
            found[run] = digests_of(result)
            print(f"{run}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)
    return found


def output_of(*command: str, fails: bool = False) -> str:
    """What a program prints.

    Args:
      fails: whether it may exit with another code than 0.

    Raises:
      SystemExit: it failed.
    """
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and not fails:
        raise SystemExit(
            f"Found exit code {done.returncode} of {' '.join(command)}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout


def simulate(given: argparse.Namespace) -> Found:
    """What `make simulate` prints, without what depends on the machine's speed."""
    command = ("-m", "tests.simulation", "--seeds", str(given.seeds), "--processes", str(os.cpu_count()))
    text = re.sub(r", in [\d.]+ s \([^)]*\)", "", output_of(*command, fails=True))
    counts = {name: int(number) for number, name in re.findall(r"^ +(\d+)  ([^:\n]+)", text, re.MULTILINE)}
    totals, failed = (
        [line for line in text.splitlines() if re.match(start, line)] for start in (r"[a-z].*\d", "FAILED")
    )
    return {"seeds": given.seeds, "totals": totals, "failed": failed, **counts}


def conformance(given: argparse.Namespace) -> Found:
    """How many tests ended how."""
    text = output_of("-m", "pytest", "tests/conformance", "-n", str(os.cpu_count()), "--dist", "loadscope", fails=True)
    last = text.splitlines()[-1]
    return {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}


def step(given: argparse.Namespace) -> Found:
    """The numbers, and the walk of a batch, which is printed but not compared."""
    walk = json.loads(output_of("benchmarks/step_trace.py").splitlines()[-1])
    print("A steady step passes, in this order:", *walk["files"], sep="\n  ", file=sys.stderr)
    return {"files": len(walk["files"]), "functions": len(walk["functions"])}


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def lines(given: argparse.Namespace) -> Found:
    product = dict(sources(*FLOORS))
    is_core = {name: not name.startswith((*ANNEXES, "jobs/", "serving/", "tools/")) for name in product}
    where = defaultdict(set)
    for name, text in product.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].add(name)
    count = {name: len(text.splitlines()) for name, text in product.items()}
    return {
        "core": sum(number for name, number in count.items() if is_core[name]),
        "product": sum(count.values()),
        "tests": sum(len(text.splitlines()) for _, text in sources("tests")),
        "source files": len(product),
        "class names with two meanings": sum(len(files) > 1 for files in where.values()),
    }


def pairs(given: argparse.Namespace) -> Found:
    """Per workload, ours over the other checkout's: the median of pairs of runs."""
    found = {}
    for bench, more in PAIRS.items():
        command = f".venv/bin/python benchmarks/dlrm.py --bench {bench}{more} --hosts 2 --seconds {given.seconds}"
        text = output_of(
            *("benchmarks/compare.py", "--rounds", str(given.rounds), "--theirs", command, "--ours", command),
            *("--theirs-folder", given.pairs_with),
        )
        result = json.loads(text.splitlines()[-1])
        found[bench] = {
            metric: result[f"{metric}_ratio"]["median"] for metric in ("samples_per_s", "samples_per_cpu_s")
        }
        print(bench, json.dumps(result), file=sys.stderr, flush=True)
    return found


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    part.__name__: part for part in (digests, step, lines, simulate, conformance, pairs)
}


def machine() -> Found:
    """What bytes depend on beside the code."""
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    libraries = {name: version(name) for name in ("jax", "jaxlib", "numpy", "numba", "pyarrow", "ray", "optax")}
    return {"cpu": next(iter(models), platform.processor()), "python": platform.python_version(), **libraries}


def leaves(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its path."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from leaves(value, f"{name}: {key}" if name else str(key))
    else:
        yield name, found


def moved(recorded: Found, found: Found) -> tuple[list[str], bool]:
    """A line for each value that is another one, and whether one of them is worse or could not be compared."""
    told, is_worse = [], False
    apart = [
        f"{name} is {found['machine'].get(name)}, recorded with {value}"
        for name, value in recorded["machine"].items()
        if found["machine"].get(name) != value
    ]
    for part in PARTS:
        if part not in recorded or part not in found:
            continue
        if part == "digests" and apart:
            is_worse = True
            told.append(
                f"Digests are not compared: {'; '.join(apart)}. Record both on one machine with the same versions."
            )
            continue
        before, now = dict(leaves(recorded[part])), dict(leaves(found[part]))
        if part == "simulate" and before["seeds"] != now["seeds"]:
            is_worse = True
            told.append(f"simulate is not compared: it ran {now['seeds']} seeds, recorded were {before['seeds']}.")
            continue
        for name in {**before, **now}:
            was, value = before.get(name), now.get(name)
            if was != value and part != "pairs":
                told.append(f"{part}: {name}: {was} before, {value} now")
                is_worse |= part in ("digests", "simulate") or (part in IS_WORSE_MORE and (value or 0) > (was or 0))
    return told, is_worse


def failures(found: Found) -> list[str]:
    """What is wrong whatever was recorded."""
    told = []
    runs = found.get("digests", {})
    for run, made in runs.items():
        if (undisturbed := runs.get(run.removesuffix(", killed"))) != made:
            told.append(f"digests: {run}: not the bytes of the undisturbed run: {made}, {undisturbed}")
    told += [
        f"conformance: {number} {kind}"
        for kind, number in found.get("conformance", {}).items()
        if kind.startswith(("failed", "error"))
    ]
    told += [f"simulate: {line}" for line in found.get("simulate", {}).get("failed", ())]
    for bench, ratios in found.get("pairs", {}).items():
        told += [
            f"pairs: {bench}: {metric} is {ratio} of the other checkout's"
            for metric, ratio in ratios.items()
            if ratio < 1 - MOST_SLOWER
        ]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts")
    parser.add_argument("--record", type=Path, help="write what was found to this file; parts that did not run stay")
    parser.add_argument("--against", type=Path, help="compare with what such a file says")
    parser.add_argument("--pairs-with", help="another checkout, with an environment in .venv")
    parser.add_argument("--seeds", type=int, default=1000, help="of simulate")
    parser.add_argument("--rounds", type=int, default=3, help="of pairs")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a run of pairs")
    given = parser.parse_args()
    parts = given.only or [part for part in PARTS if part != "pairs" or given.pairs_with]
    if "pairs" in parts and not given.pairs_with:
        parser.error("Found pairs in --only without --pairs-with. Expected the folder of another checkout.")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    found: Found = {
        "benchmark": "proof",
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
    }
    for part in parts:
        found[part] = PARTS[part](given)
    told, is_worse = moved(json.loads(given.against.read_text()), found) if given.against else ([], False)
    wrong = failures(found)
    print(*told, *wrong, sep="\n", file=sys.stderr)
    if given.record:
        kept = json.loads(given.record.read_text()) if given.record.exists() else {}
        given.record.write_text(json.dumps({**kept, **found}, indent=1) + "\n")
    print(json.dumps(found | {"moved": len(told), "wrong": len(wrong)}), flush=True)
    sys.exit(1 if is_worse or wrong else 0)


if __name__ == "__main__":
    # Each process would compile all of our modules if none kept what it compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Before JAX makes its devices. Hosts set the same for themselves.
    os.environ.setdefault("PJRT_NPROC", "1")
    main()
