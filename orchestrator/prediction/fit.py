"""Corrections of a machine: what made-up jobs took in runs, against what is predicted for them without corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.orchestrator.prediction.timeline import Timeline, crowding
from podembed.workers.calibration.pod import PodSteps
from podembed.workers.calibration.record import Correction, PodCorrections
from podembed.workers.liveness.progress import Phase

OVERLAPPED = (
    Phase.READ,
    Phase.DEDUP,
    Phase.ID_EXCHANGE,
    Phase.GROUP,
    Phase.SPLIT,
    Phase.PREFETCH_GATHER,
    Phase.PREFETCH_POOL,
    Phase.PREFETCH_EXCHANGE,
)
"""What a host does while its device works."""
_LEAST_S = 2e-5
# A host that waits for its device for a smaller part of the step does not show how long the device takes.
_LEAST_WAIT = 0.05
_LEAST_SAMPLES = 3

Samples = list[tuple[float, float, float]]
"""Seconds alone, seconds of work before, and measured seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPod:
    """One made-up job: its step as it is predicted without corrections, followed to its end, and as it was measured."""

    timeline: Timeline
    steps: PodSteps


def corrections(pods: Sequence[MeasuredPod], *, hosts: int, cpus: int, reading: float) -> PodCorrections:
    """By a fit of factors and a constant for each phase, none of them negative.

    What is measured while processes share processors is first divided by how much slower that makes them.
    """
    always, beside = crowding(hosts, cpus)
    samples: dict[str, Samples] = {}
    for pod in pods:
        for name, found in _samples(pod, always=always, beside=beside).items():
            samples.setdefault(name, []).extend(found)
    fits = {name: fitted(found) for name, found in samples.items()}
    device, between = fits.pop(_DEVICE), fits.pop(str(Phase.BETWEEN))
    return PodCorrections(hosts=hosts, phases=fits, device=device, between=between, reading=reading)


_DEVICE = str(Phase.DEVICE)


def _samples(pod: MeasuredPod, *, always: float, beside: float) -> Mapping[str, Samples]:
    """By phase, seconds that are predicted and seconds that were measured, both without other processes."""
    steps, alone = pod.steps, pod.timeline.alone
    hosts = steps.phase_s
    spent = {phase: np.array([host.get(str(phase), 0.0) for host in hosts]) for phase in Phase}
    between = np.maximum(0.0, steps.step_s - sum(spent.values()))
    host_s = float(np.mean(between + sum(spent[phase] for phase in OVERLAPPED)))
    wait_s = float(np.mean(spent[Phase.DEVICE]))
    device_s = host_s + wait_s if wait_s > _LEAST_WAIT * steps.step_s else float(np.mean(steps.device_s))
    lost_s = min(host_s, device_s) * beside / (1 + beside)
    stretch = host_s / (host_s - lost_s) if host_s > lost_s else 1.0
    found: dict[str, Samples] = {}
    for phase, seconds in spent.items():
        if phase is Phase.DEVICE or not (phase in alone or phase is Phase.READ):
            continue
        predicted = np.zeros(len(hosts)) + alone.get(phase, 0.0)
        seconds = seconds / always / (stretch if phase in OVERLAPPED else 1.0)
        # A phase that did not take place, though it might have, says nothing of what it takes.
        if phase is Phase.READ or (seconds.max() > _LEAST_S and predicted.max() > 0):
            found[str(phase)] = _of_phase(phase, predicted, seconds, pod.timeline.before.get(phase, 0.0))
    device_alone_s = pod.timeline.device_alone_s
    found[str(Phase.BETWEEN)] = [(device_alone_s, 0.0, float(np.mean(between)) / always / stretch)]
    found[_DEVICE] = [(device_alone_s, 0.0, (device_s - lost_s) / always)]
    return found


def _of_phase(phase: Phase, predicted: np.ndarray, measured: np.ndarray, before_s: float) -> Samples:
    if phase.waits_for_hosts:
        # The host that came last did not wait for others.
        at = int(np.argmin(measured))
        return [(float(predicted[at]), before_s, float(measured[at]))]
    return [(float(one), 0.0, float(other)) for one, other in zip(predicted, measured, strict=True)]


def fitted(samples: Samples) -> Correction:
    """Factors and a constant that bring the predicted seconds to the measured ones. Relative errors count.

    Of few samples only a constant is found.
    """
    if len(samples) < _LEAST_SAMPLES:
        return Correction(constant_s=max(0.0, float(np.mean([found - alone for alone, _, found in samples]))))
    from scipy.optimize import nnls  # late: whoever only predicts needs no scipy

    measured = np.array([found for _, _, found in samples])
    weights = 1 / np.maximum(measured, _LEAST_S)
    columns = np.array([(alone, _LEAST_S, before) for alone, before, _ in samples]) * weights[:, None]
    found, _ = nnls(columns, measured * weights)
    errors = np.abs(columns @ found - measured * weights)
    factor, constant, before = (float(value) for value in found)
    return Correction(factor=factor, constant_s=_LEAST_S * constant, before=before, error=float(np.median(errors)))
