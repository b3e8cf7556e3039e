"""The dense half of a job, measured in child processes that have the environment of a run's workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from podembed.orchestrator.cluster.worker_environment import worker_environment
from podembed.orchestrator.prediction.demand import DenseHalf
from podembed.orchestrator.prediction.on_devices.exchanged import exchanged_bytes
from podembed.workers.calibration.measure import MAX_SIDE_BY_SIDE, measure_models
from podembed.workers.calibration.record import Calibration, ModelTime
from podembed.workers.job.job import JobConfig
from podembed.workers.job.on_devices.moved import on_devices
from podembed.workers.job.reference import JobReference


def default_path() -> Path:
    """Where the constants of this machine lie if nothing else is said."""
    return Path("~/.podembed/calibration.json").expanduser()


def children_environment(threads: int) -> dict[str, str]:
    """That of a run's workers on this machine, for processes that measure."""
    environ = dict(os.environ)
    # Jobs are imported by name, from the folder that the program was called in.
    places = [os.getcwd(), environ.get("PYTHONPATH", "")]
    environment = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    return environment | worker_environment("host", resources={}, threads=threads, environ=environment)


def dense_halves(
    job: JobConfig,
    reference: JobReference | None,
    calibration: Calibration,
    *,
    num_hosts: int,
    num_processes: int,
    threads: int = 1,
    lengths: Mapping[str, float] | None = None,
    moved: Sequence[Sequence[str]] = ((),),
) -> list[DenseHalf]:
    """The job's own training step, measured with a host's samples. Its overhead is that of this machine's device.

    Tables on devices are a part of it. What devices exchange for them is counted as for gradients.

    Args:
      reference: by which a child builds the job; None leaves the dense half out.
      num_processes: that work side by side on one machine.
      threads: of a device process.
      lengths: by feature the mean length of its bags; 1 where nothing is said.
      moved: for each step the tables that are put on the devices, beside those that are there. By default one step,
        of the job as it is.

    Raises:
      MeasuringFailed: a child ended without an answer.
    """
    if reference is None:
        return [DenseHalf(step_s=0.0, sample_s=0.0) for _ in moved]
    samples = max(1, job.batch_size // num_hosts)
    times = measure_models(
        [(reference, samples)] * len(moved),
        num_processes=min(num_processes, MAX_SIDE_BY_SIDE),
        environment=children_environment(threads),
        threads=threads,
        on_devices=moved,
        ids_per_bag=lengths,
    )
    found = [dense_of(time, calibration, num_processes=num_processes) for time in times]
    return [
        replace(one, gradient_bytes=one.gradient_bytes + exchanged_bytes(on_devices(job, names), lengths or {}))
        for one, names in zip(found, moved, strict=True)
    ]


def dense_of(time: ModelTime, calibration: Calibration, *, num_processes: int) -> DenseHalf:
    """From what a device process took, with so many of them side by side."""
    step_s = min(time.cpu_s, calibration.dense_for(num_processes).step_s)
    sample_s = (time.cpu_s - step_s) / time.num_samples
    threads = max(1.0, time.cpu_s / time.step_s) if time.step_s else 1.0
    return DenseHalf(step_s=step_s, sample_s=sample_s, gradient_bytes=time.gradient_bytes, threads=threads)


def hosts_together(num_hosts: int, cpus: int) -> int:
    """Hosts a machine, where nothing else is said: all of them if it has as many processors, else one."""
    return num_hosts if num_hosts <= cpus else 1
