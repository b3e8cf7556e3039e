"""Trains jobs for some steps with the processes of a run, hosts and devices, and says what each phase took.

What runs is what a run has: `HostWorker`, `DeviceWorker`, mesh, shared memory and gang. Only the driver is simpler, and
there is no Ray. So waking up, sharing processors and caches that others emptied are in what is measured.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from podembed.workers.calibration.measure import MeasuringFailed
from podembed.workers.job.reference import JobReference

_WARM_UP_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSteps:
    """What the steps of a pod took.

    Attributes:
      step_s: of a step, in the middle half of the windows.
      phase_s: by host, seconds of each phase in a step.
      phase_cpu_s: by host, processor seconds of its working thread in each phase, and between them.
      host_cpu_s: by host, of all its threads in all windows and between them, since a reader reads ahead.
      device_s: by device.
      device_cpu_s: by device, processor seconds of all its threads.
      gradient_bytes: of the parameters' gradients.
    """

    step_s: float
    phase_s: tuple[Mapping[str, float], ...]
    phase_cpu_s: tuple[Mapping[str, float], ...]
    host_cpu_s: tuple[float, ...]
    device_s: tuple[float, ...]
    device_cpu_s: tuple[float, ...]
    gradient_bytes: float


class _Child:
    """One process of the pod. Mutated: what was asked of it."""

    def __init__(self, kind: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "podembed.workers.calibration.pod_process", kind]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            text=True,
            encoding="utf-8",
        )

    def ask(self, method: str, *arguments: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps([method, *arguments]) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def answer(self) -> Any:
        pipe = self._process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise self._gone()
        found = json.loads(line)
        if "error" in found:
            raise MeasuringFailed(f"Found an error in a process of a pod: {found['error']}")
        return found["answer"]

    def _gone(self) -> MeasuringFailed:
        return MeasuringFailed(f"Found exit status {self._process.wait()} of a process of a pod.")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure_pods(
    jobs: Sequence[tuple[JobReference, bool]],
    *,
    num_hosts: int,
    environment: Mapping[str, str],
    threads: int = 1,
    windows: int = 12,
    window_s: float = 0.15,
) -> list[PodSteps]:
    """The same processes train one job after another.

    Args:
      jobs: and whether all their tables are cut.
      threads: of a device, as the environment says them. With one, hosts keep to processors as in a run.

    Raises:
      MeasuringFailed: a child ended, or failed.
    """
    with ExitStack() as opened:
        storage = opened.enter_context(tempfile.TemporaryDirectory(prefix="podembed-calibrate-"))
        hosts = [_Child("host", environment) for _ in range(num_hosts)]
        devices = [_Child("device", environment) for _ in range(num_hosts)]
        for child in (*hosts, *devices):
            opened.callback(child.end)
        devices[0].ask("reserve")
        coordinator = devices[0].answer()
        for rank, device in enumerate(devices):
            device.ask("join", coordinator, num_hosts, rank, threads)
        for device in devices:
            device.answer()
        found = []
        for number, (reference, is_cut) in enumerate(jobs):
            gradient_bytes = _begin(hosts, devices, reference, number, threads, is_cut=is_cut, storage=storage)
            found.append(_steps(hosts, devices, gradient_bytes, windows=windows, window_s=window_s))
        return found


def _begin(
    hosts: Sequence[_Child],
    devices: Sequence[_Child],
    reference: JobReference,
    generation: int,
    threads: int,
    *,
    is_cut: bool,
    storage: str,
) -> float:
    job = {"function": reference.function, "arguments": dict(reference.arguments), "folder": reference.folder}
    request = {"job": job, "hosts": len(hosts), "generation": generation, "is_cut": is_cut, "storage": storage}
    request["threads"] = threads
    request["token"] = secrets.token_hex(32)
    for number, host in enumerate(hosts):
        host.ask("begin", {**request, "host": number})
    ready = [host.answer() for host in hosts]
    for host in hosts:
        host.ask("connect", [one["address"] for one in ready])
    for device, one in zip(devices, ready, strict=True):
        device.ask("begin", job, one["samples"], one["invitation"])
    for host in hosts:
        host.answer()
    bytes_of_each = [device.answer() for device in devices]
    return bytes_of_each[0]


def _steps(
    hosts: Sequence[_Child], devices: Sequence[_Child], gradient_bytes: float, *, windows: int, window_s: float
) -> PodSteps:
    step, count = 0, _WARM_UP_STEPS
    measured: list[_Window] = []
    for window in range(1 + windows):
        for host in hosts:
            host.ask("train", step, step + count)
        for device in devices:
            device.ask("serve")
        answers, served = [host.answer() for host in hosts], [device.answer() for device in devices]
        found = _Window.of(answers, served, count=count)
        if window:
            measured.append(found)
        step, count = step + count, max(4, int(window_s / found.step_s))
    # A run has good and bad moments. The middle half of the windows is what most of them are like.
    usual = sorted(measured, key=lambda one: one.step_s)[windows // 4 :][: max(1, windows // 2)]
    ranks = range(len(hosts))
    return PodSteps(
        step_s=statistics.fmean(one.step_s for one in usual),
        phase_s=tuple(_mean([one.phase_s[at] for one in usual]) for at in ranks),
        phase_cpu_s=tuple(_mean([one.phase_cpu_s[at] for one in usual]) for at in ranks),
        host_cpu_s=tuple(statistics.fmean(one.host_cpu_s[at] for one in measured) for at in ranks),
        device_s=tuple(statistics.fmean(one.device_s[at][0] for one in usual) for at in ranks),
        device_cpu_s=tuple(statistics.fmean(one.device_s[at][1] for one in usual) for at in ranks),
        gradient_bytes=gradient_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """One window of steps, by step; hosts and devices in their order. `device_s` has seconds and processor seconds."""

    step_s: float
    phase_s: list[dict[str, float]]
    phase_cpu_s: list[dict[str, float]]
    host_cpu_s: list[float]
    device_s: list[list[float]]

    @staticmethod
    def of(answers: Sequence[Mapping[str, Any]], served: Sequence[Sequence[float]], *, count: int) -> _Window:
        """From what the processes answered for so many steps."""
        return _Window(
            step_s=max(answer["seconds"] for answer in answers) / count,
            phase_s=[_each(answer["phase_s"], count) for answer in answers],
            phase_cpu_s=[_each(answer["phase_cpu_s"], count) for answer in answers],
            host_cpu_s=[answer["cpu_s"] / count for answer in answers],
            device_s=[[spent / count for spent in both] for both in served],
        )


def _each(phases: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: spent / count for name, spent in phases.items()}


def _mean(windows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    names = dict.fromkeys(name for window in windows for name in window)
    return {name: statistics.fmean(window.get(name, 0.0) for window in windows) for name in names}
