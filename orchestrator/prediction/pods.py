"""Corrections of this machine's constants, from made-up jobs that are trained with the processes of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from podembed.orchestrator.prediction.dense_half import dense_of
from podembed.orchestrator.prediction.fit import MeasuredPod, corrections
from podembed.orchestrator.prediction.forecast import setting_of
from podembed.orchestrator.prediction.placed import placed_demands
from podembed.orchestrator.prediction.step import timeline_of
from podembed.orchestrator.prediction.timeline import Timeline
from podembed.workers.calibration.measure import MAX_SIDE_BY_SIDE, measure_models
from podembed.workers.calibration.pod import PodSteps, measure_pods
from podembed.workers.calibration.pod_jobs import PROBES, reference_of, write_files
from podembed.workers.calibration.pod_specs import index_of, owners_of
from podembed.workers.calibration.record import Calibration, ModelTime, PodCorrections
from podembed.workers.input.profile import measure_input, measure_profile
from podembed.workers.job.job import JobConfig

_READING = ("files", "memory")
_READING_COSTS = (0.5, 3.0)


def with_pods(
    calibration: Calibration,
    *,
    environment: Mapping[str, str],
    activity: Callable[[str], None] = lambda what: None,
    names: Sequence[str] = tuple(PROBES),
    window_s: float = 0.15,
) -> Calibration:
    """Constants with corrections for one host on this machine, and for as many as it has processors.

    Args:
      environment: of the children.
      activity: told what is measured next.
      names: of the made-up jobs; "files" and "memory" are among them.
      window_s: how long a window of steps takes.

    Raises:
      MeasuringFailed: a child ended without an answer.
    """
    cpus = calibration.machine.cpus
    found = []
    with tempfile.TemporaryDirectory(prefix="podembed-calibrate-") as folder:
        write_files("files", Path(folder))
        references = [reference_of(name, folder) for name in names]
        jobs = [reference.resolve() for reference in references]
        for hosts in sorted({1, min(cpus, MAX_SIDE_BY_SIDE)}):
            activity(f"made-up jobs on {hosts} host(s), with the processes of a run")
            pods = measure_pods(
                [(reference, PROBES[name].is_cut) for name, reference in zip(names, references, strict=True)],
                num_hosts=hosts,
                environment=environment,
                threads=calibration.threads,
                window_s=window_s,
            )
            models = measure_models(
                [(reference, job.batch_size // hosts) for reference, job in zip(references, jobs, strict=True)],
                num_processes=hosts,
                environment=environment,
                threads=calibration.threads,
            )
            measured: list[MeasuredPod] = []
            by_name = dict(zip(names, pods, strict=True))
            for name, job, steps, model in zip(names, jobs, pods, models, strict=True):
                if not PROBES[name].reads_files:
                    make = partial(_timeline, name, job, replace(calibration, pods=()), model, hosts)
                    measured.append(MeasuredPod(timeline=make, steps=steps))
            reading = _reading(by_name, jobs[list(names).index("files")], hosts)
            found.append(corrections(measured, hosts=hosts, reading=reading))
    return replace(calibration, pods=tuple(found))


def _timeline(
    name: str,
    job: JobConfig,
    calibration: Calibration,
    model: ModelTime,
    hosts: int,
    found: PodCorrections | None,
) -> Timeline:
    """Of a made-up job, with these corrections."""
    setting = setting_of(job, num_hosts=hosts, hosts_a_machine=hosts, reads_files=False)
    owners = owners_of(job, num_hosts=hosts, is_cut=PROBES[name].is_cut)
    tables = placed_demands(job, owners, measure_profile(job, index_of(job)), num_hosts=hosts)
    dense = dense_of(model, calibration, num_processes=hosts)
    known = calibration if found is None else replace(calibration, pods=(found,))
    return timeline_of(tables, setting, calibration=known, dense=dense)


def _reading(pods: Mapping[str, PodSteps], job: JobConfig, hosts: int) -> float:
    """Processor seconds of decoding in a run for each that it takes alone. Noise makes it neither nothing nor large."""
    files, memory = (float(np.mean(pods[name].host_cpu_s)) for name in _READING)
    read_s = measure_input(job, index_of(job))[1] * job.batch_size / hosts
    return float(np.clip((files - memory) / read_s, *_READING_COSTS))
