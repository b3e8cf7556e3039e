"""Measures all constants of this machine, in child processes that have the environment of a run's workers.

Kernels and dense steps are measured twice: by one process alone, and by one process a CPU side by side. Hosts that
share a machine also share its memory and its caches. Of several children the slowest counts, since hosts wait for each
other.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from podembed.embedding.costs.constants import Kernels
from podembed.workers.calibration.exchange import wire_of
from podembed.workers.calibration.record import FORMAT, Calibration, CalibrationError, Dense, Machine, ModelTime
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.records import from_document

Value = TypeVar("Value")

MAX_SIDE_BY_SIDE = 4
MANY_HOSTS = 4
_TIMEOUT_S = 900.0


class MeasuringFailed(CalibrationError):
    """A child process did not measure what it was asked to."""


def calibrate(
    *,
    machine: Machine,
    environment: Mapping[str, str],
    threads: int,
    code: str,
    now_unix_s: float,
    activity: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Measures everything; takes a minute or two.

    Args:
      environment: of the children, as that of a run's workers.
      threads: of a host's kernels and its device, as the environment says them.
      code: version of the program.
      activity: told what is measured next.

    Raises:
      MeasuringFailed: a child ended without an answer.
    """
    counts = sorted({1, min(machine.cpus, MAX_SIDE_BY_SIDE)})
    kernels, dense = [], {}
    for count in counts:
        together = "alone" if count == 1 else f"{count} processes side by side"
        activity(f"memory and kernels, {together}")
        found = answers_of([{"measure": "lookups", "processes": count}] * count, environment, threads=threads)
        kernels.append(_slowest_kernels([from_document(Kernels, "kernels", document) for document in found]))
        activity(f"a dense step, {together}")
        steps = [
            from_document(Dense, "dense", document)
            for document in answers_of([{"measure": "dense"}] * count, environment, threads=threads)
        ]
        dense[str(count)] = max(steps, key=lambda step: step.seconds(flops=1e9, num_bytes=1e8))
    activity("an exchange")
    pair, many = measure_exchanges(2, environment), measure_exchanges(MANY_HOSTS, environment)
    activity("reading")
    ((sample_s, id_s),) = answers_of([{"measure": "reading"}], environment)
    return Calibration(
        format=FORMAT,
        code=code,
        machine=machine,
        measured_unix_s=now_unix_s,
        threads=threads,
        kernels=tuple(kernels),
        wire=wire_of(pair, many, num_hosts=MANY_HOSTS, cpus=machine.cpus),
        dense=dense,
        sample_s=float(sample_s),
        id_s=float(id_s),
    )


def measure_exchanges(num_hosts: int, environment: Mapping[str, str]) -> list[float]:
    """Seconds of an exchange between so many children, for each of `SIZES_BYTES`, as the slowest one saw them."""
    token = secrets.token_hex(32)
    requests = [{"measure": "exchange", "rank": rank, "token": token, "hosts": num_hosts} for rank in range(num_hosts)]
    return [max(times) for times in zip(*answers_of(requests, environment), strict=True)]


def measure_models(
    jobs: Sequence[tuple[JobReference, int]],
    *,
    num_processes: int,
    environment: Mapping[str, str],
    threads: int = 1,
    on_devices: Sequence[Sequence[str]] | None = None,
    ids_per_bag: Mapping[str, float] | None = None,
) -> list[ModelTime]:
    """Steps of the dense halves of jobs with so many samples, in so many processes side by side; the slowest ones.

    Args:
      threads: of each process, as the environment says them.
      on_devices: for each job names of tables that are put there, beside those that it declares so.
      ids_per_bag: as of `measure_model`.
    """
    request = {
        "measure": "models",
        "jobs": [{"function": job.function, "arguments": dict(job.arguments), "folder": job.folder} for job, _ in jobs],
        "samples": [samples for _, samples in jobs],
        "on_devices": [list(names) for names in on_devices or [()] * len(jobs)],
        "ids_per_bag": dict(ids_per_bag or {}),
    }
    answers = answers_of([request] * num_processes, environment, threads=threads)
    found = [[from_document(ModelTime, "model", document) for document in answer] for answer in answers]
    return [max(times, key=lambda time: time.step_s) for times in zip(*found, strict=True)]


def _slowest_kernels(found: Sequence[Kernels]) -> Kernels:
    """The constants of the child that took longest over everything."""
    return max(found, key=lambda kernels: sum(sum(factors) for factors in kernels.factors_ns.values()))


def answers_of(requests: Sequence[Mapping[str, Any]], environment: Mapping[str, str], *, threads: int = 1) -> list[Any]:
    """The answers of children that work side by side, in the order of the requests. As hosts, they keep to processors
    of their own where there are as many, with so many threads each.
    """
    command = [sys.executable, "-m", "podembed.workers.calibration.process"]
    children = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=dict(environment)
        )
        for _ in requests
    ]
    try:
        for place, (child, request) in enumerate(zip(children, requests, strict=True)):
            _tell(child, {**request, "place": place, "of": len(requests), "threads": threads})
        if requests[0]["measure"] == "exchange":
            addresses = [_line(child) for child in children]
            for child in children:
                _tell(child, addresses)
        return [_last_line(child) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def _tell(child: subprocess.Popen[str], value: Any) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(value) + "\n")
    child.stdin.flush()


def _line(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    return _parsed(child, child.stdout.readline())


def _last_line(child: subprocess.Popen[str]) -> Any:
    try:
        out, _ = child.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MeasuringFailed(f"Found no answer of a measuring process within {_TIMEOUT_S:g} s. Try again.") from None
    lines = out.splitlines()
    return _parsed(child, lines[-1] if lines else "")


def _parsed(child: subprocess.Popen[str], line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise MeasuringFailed(
            f"Found exit status {child.wait()} of a measuring process, and no answer. Expected JSON. See above."
        ) from None
