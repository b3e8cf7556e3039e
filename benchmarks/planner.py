"""Predicted and measured steps side by side, by phase, for some workloads. Prints one JSON line.

    podembed calibrate --out constants.json
    python benchmarks/planner.py --constants constants.json --bench tiny small-C small-C2 --hosts 2

The constants are measured first, if the file is not there. Each workload is predicted from two of its batches, and then
trained with the processes of real training, as `benchmarks/dlrm.py` does it. Phases are those of host 0: what its
working thread computes in each, and what it waits for. Relative errors are predicted over measured, less 1. The aims:
phases within 25 %, the step within 15 %. Those of less than 3 % of a step are judged together, as "other". On a busy
machine compare `cpu_ms`, processor milliseconds of all hosts and devices in a step, since other programs change them
little.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks import dlrm, workloads  # noqa: E402
from podembed.jobs.cli.calibrating import Calibrate, calibrate  # noqa: E402
from podembed.orchestrator.api.result import Prediction  # noqa: E402
from podembed.orchestrator.prediction.dense_half import children_environment, dense_halves  # noqa: E402
from podembed.orchestrator.prediction.forecast import setting_of  # noqa: E402
from podembed.orchestrator.prediction.placed import placed_demands  # noqa: E402
from podembed.orchestrator.prediction.report import render_comparison  # noqa: E402
from podembed.orchestrator.prediction.step import predict  # noqa: E402
from podembed.orchestrator.prediction.timeline import PredictedStep  # noqa: E402
from podembed.workers.calibration.pod import measure_pods  # noqa: E402
from podembed.workers.calibration.pod_specs import index_of  # noqa: E402
from podembed.workers.calibration.record import Calibration, read_calibration, this_machine  # noqa: E402
from podembed.workers.input.profile import measure_profile  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.job.reference import JobReference  # noqa: E402
from podembed.workers.job.tables import choose_buckets  # noqa: E402
from podembed.workers.liveness.step_parts import parts_of_step  # noqa: E402

LEAST_SHARE = 0.03
OTHER = "other"
# Two tables that two hosts would take whole.
CUT = ("C2", "small-C2")


def predicted(
    job: JobConfig, reference: JobReference, arguments: argparse.Namespace, constants: Calibration
) -> PredictedStep:
    """The step of a workload as `dlrm.start_group` places it."""
    hosts = arguments.hosts
    profiles = measure_profile(job, index_of(job))
    tables = placed_demands(job, dlrm.placement(job, choose_buckets(job), arguments), profiles, num_hosts=hosts)
    threads = arguments.threads
    setting = setting_of(job, num_hosts=hosts, hosts_a_machine=hosts, reads_files=False, threads=threads)
    together = min(hosts, constants.machine.cpus)
    (dense,) = dense_halves(job, reference, constants, num_hosts=hosts, num_processes=together, threads=threads)
    return predict(tables, setting, calibration=constants, dense=dense)


def errors(step: PredictedStep, measured: dict[str, Any]) -> dict[str, Any]:
    """What the line says of one workload."""
    total_ms = measured["step_ms"]
    found_ms = parts_of_step(measured["phase_ms"], measured["phase_cpu_ms"], total_ms)
    found_ms = {name: round(value, 2) for name, value in found_ms.items()}
    expected_ms = {part: 1e3 * seconds for part, seconds in step.parts_s.items()}
    large = [
        name
        for name in dict.fromkeys((*expected_ms, *found_ms))
        if max(expected_ms.get(name, 0.0), found_ms.get(name, 0.0)) >= LEAST_SHARE * total_ms
    ]
    for parts in (expected_ms, found_ms):
        parts[OTHER] = round(sum(spent for name, spent in parts.items() if name not in large), 3)
    large.append(OTHER)
    off = {name: _off(expected_ms.get(name, 0.0), found_ms.get(name, 0.0)) for name in large}
    cpu_ms = measured["cpu_ms_per_step"]
    return {
        "predicted_ms": round(1e3 * step.step_s, 2),
        "measured_ms": total_ms,
        "total_off": _off(1e3 * step.step_s, total_ms),
        "phases_ms": {name: [round(expected_ms.get(name, 0.0), 2), found_ms.get(name, 0.0)] for name in large},
        "phases_off": off,
        "phases_within_25": sum(abs(value) <= 0.25 for value in off.values()),
        "phases": len(off),
        "predicted_wire_mb": round(step.setting.num_hosts * step.sent_bytes / 1e6, 3),
        "measured_wire_mb": measured["wire_mb_per_step"],
        "cpu_ms": [
            round(1e3 * step.setting.num_hosts * step.cpu_s, 2),
            round(cpu_ms.get("hosts", 0.0) + cpu_ms.get("devices", 0.0), 2),
        ],
        "device_ms": [round(1e3 * step.device_s, 2), measured["device_ms"]],
        "quiet_windows": [measured["quiet_windows"], measured["windows"]],
        "other_cpus_busy": measured["other_cpus_busy"],
    }


def _off(expected: float, found: float) -> float:
    return round(expected / found - 1, 3) if found else float(np.inf)


def in_made_up_run(reference: JobReference, arguments: argparse.Namespace) -> dict[str, float]:
    """By part, milliseconds of a step on host 0 in the processes of a calibration."""
    (steps,) = measure_pods(
        [(reference, arguments.placement == "buckets")],
        num_hosts=arguments.hosts,
        environment=children_environment(arguments.threads),
        threads=arguments.threads,
    )
    parts = parts_of_step(steps.phase_s[0], steps.phase_cpu_s[0], steps.step_s)
    return {name: round(1e3 * spent, 2) for name, spent in parts.items()}


def run(bench: str, arguments: argparse.Namespace, constants: Calibration) -> dict[str, Any]:
    """One workload, predicted and then trained."""
    from podembed.orchestrator.cluster.connection import connected

    arguments.bench = bench
    arguments.placement = "buckets" if bench in CUT else "tables"
    with tempfile.TemporaryDirectory(prefix="podembed-planner-") as folder:
        reference, batch_size = dlrm.write_job(folder, arguments)
        step = predicted(reference.resolve(), reference, arguments, constants)
        made_up = in_made_up_run(reference, arguments) if arguments.made_up else None
        with connected(arguments.hosts):
            group = dlrm.start_group(arguments, reference)
            try:
                measured = dlrm.measure(group, arguments, batch_size)
                group.close()
            finally:
                group.stop()
    compared = Prediction(
        step_s=step.step_s,
        phase_s=step.parts_s,
        measured_step_s=measured["step_ms"] / 1e3,
        measured_phase_s={
            part: spent / 1e3
            for part, spent in parts_of_step(
                measured["phase_ms"], measured["phase_cpu_ms"], measured["step_ms"]
            ).items()
        },
    )
    print(f"{bench}\n{render_comparison(compared)}", file=sys.stderr)
    return {"bench": bench, "placement": arguments.placement, **errors(step, measured), "made_up_ms": made_up}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("A", "B", "cut", "tiny", *workloads.NAMES)
    parser.add_argument("--bench", nargs="+", default=["tiny", "small-C", "small-C2"], choices=names)
    parser.add_argument("--constants", required=True, help="file of podembed calibrate --out")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each of the two processes of a host")
    parser.add_argument("--seconds", type=float, default=8.0, help="measure each for at least so long")
    parser.add_argument("--emb-opt", default="rowwise", choices=["rowwise", "adagrad"], help="rule of the tables")
    parser.add_argument("--overlap", default="on", choices=["on", "off"])
    parser.add_argument("--staleness", type=int, default=0, choices=[0, 1])
    parser.add_argument("--wire-dtype", default="float32", choices=dlrm.WIRE_DTYPES)
    parser.add_argument("--made-up", action="store_true", help="also train it with the processes of a calibration")
    arguments = parser.parse_args(given)
    arguments.max_seconds, arguments.device_ms, arguments.resources = 2 * arguments.seconds, None, ()
    dlrm.prepare_environment()
    path = Path(arguments.constants)
    constants = read_calibration(path, this_machine())
    if constants is None:
        calibrate(Calibrate(out=str(path)))
        constants = read_calibration(path, this_machine())
    assert constants is not None
    found = [run(bench, arguments, constants) for bench in arguments.bench]
    setting = {
        name: getattr(arguments, name) for name in ("hosts", "threads", "emb_opt", "overlap", "staleness", "wire_dtype")
    }
    line = {"benchmark": "planner", **setting, "workloads": found, "load1": os.getloadavg()[0]}
    print(json.dumps(line | {"date": time.strftime("%Y-%m-%d")}))


if __name__ == "__main__":
    main()
