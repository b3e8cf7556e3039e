"""Corrections of a machine: what made-up jobs took in runs, against what their kernels and messages take alone.

Processor seconds are fitted first, phase by phase. Then the seconds that pass without a processor are found: those with
which followed steps come nearest to the measured ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from podembed.embedding.costs.constants import fitted_columns
from podembed.orchestrator.prediction.sharing import Followed
from podembed.orchestrator.prediction.timeline import Timeline
from podembed.workers.calibration.pod import PodSteps
from podembed.workers.calibration.record import Correction, PodCorrections, Waiting
from podembed.workers.liveness.progress import Phase
from podembed.workers.liveness.step_parts import FOR_INPUT, WAITS, parts_of_step

_LEAST_S = 2e-5
_LEAST_OF_ALONE = 0.1
_LEAST_SHARE = 0.03
"""Phases that take a smaller part of a step should not decide the fit."""
_MOST_TRIES = 80
_FIRST = (1e-4, 0.05, 1e-3, 0.1, 1.0)

Sample = tuple[float, float, float, float, float]
"""Seconds alone, how cold the caches are, calls, floats, and measured processor seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPod:
    """One made-up job as it was measured.

    Attributes:
      timeline: of its step with these corrections; None for none.
    """

    timeline: Callable[[PodCorrections | None], Timeline]
    steps: PodSteps


def corrections(pods: Sequence[MeasuredPod], *, hosts: int, reading: float) -> PodCorrections:
    """By fits without negative factors."""
    samples: dict[str, list[Sample]] = {}
    for pod in pods:
        for name, found in _samples(pod).items():
            samples.setdefault(name, []).extend(found)
    fits = {name: fitted(found) for name, found in samples.items()}
    device = fits.pop(str(Phase.DEVICE))
    found = PodCorrections(hosts=hosts, phases=fits, device=device, waiting=Waiting(), reading=reading)
    return replace(found, waiting=waiting(pods, found))


def _samples(pod: MeasuredPod) -> dict[str, list[Sample]]:
    """By phase, what each host does in it, and the processor seconds that it took."""
    timeline, steps = pod.timeline(None), pod.steps
    found: dict[str, list[Sample]] = {}
    names = dict.fromkeys(name for host in steps.phase_cpu_s for name in host)
    for name in names:
        pieces = [piece for piece in timeline.pieces if str(piece.phase) == name]
        families = list(dict.fromkeys(piece.family for piece in pieces))
        # Where a phase did several things, what each of them took was not measured.
        if len(families) != 1 or name == Phase.DEVICE:
            continue
        for host, phases in enumerate(steps.phase_cpu_s):
            spent = phases.get(name, 0.0)
            alone_s = sum(float(piece.alone.seconds[host]) + piece.wire_s for piece in pieces)
            calls = sum(float(piece.alone.calls[host]) for piece in pieces)
            floats = sum(float(piece.alone.floats[host]) for piece in pieces)
            # A phase that takes place on no host, though it might have, says nothing of what it takes.
            if max(of.get(name, 0.0) for of in steps.phase_cpu_s) > 0:
                found.setdefault(families[0], []).append((alone_s, timeline.cold, calls, floats, spent))
    known = (timeline.device_alone_s, timeline.cold, timeline.device_calls, timeline.device_floats)
    found[str(Phase.DEVICE)] = [(*known, spent) for spent in steps.device_cpu_s]
    return found


def fitted(samples: Sequence[Sample]) -> Correction:
    """Factors and a constant that bring what is known to the measured seconds. Relative errors count."""
    # What took a small part of what it takes alone did not take place, and would decide the fit.
    samples = [sample for sample in samples if sample[-1] >= _LEAST_OF_ALONE * sample[0]] or samples
    measured = np.array([spent for *_, spent in samples])
    columns = np.array([(alone_s, 1.0, *others) for alone_s, *others, _ in samples])
    found, errors = fitted_columns(columns, measured, least=_LEAST_S)
    factor, constant_s, cold_s, call_s, float_s = (float(value) for value in found)
    return Correction(
        factor=factor,
        constant_s=constant_s,
        cold_s=cold_s,
        call_s=call_s,
        float_s=float_s,
        error=float(np.median(errors)),
    )


def waiting(pods: Sequence[MeasuredPod], found: PodCorrections) -> Waiting:
    """With which followed steps come nearest to the measured ones, if each phase takes the processor seconds that were
    measured.
    """
    from scipy.optimize import minimize

    measured = [(pod.timeline(found), pod.steps) for pod in pods]
    input_s = statistics.median(_input_s(pod.steps) for pod in pods)

    def errors(values: Sequence[float]) -> list[float]:
        tried = _waiting(values, input_s)
        return [
            error
            for timeline, steps in measured
            for error in _errors(followed(timeline, steps, replace(found, waiting=tried)), steps)
        ]

    best = minimize(
        lambda values: float(np.mean(np.minimum(errors(values), 1.0))),
        np.zeros(len(_FIRST)),
        method="Nelder-Mead",
        options={"maxfev": _MOST_TRIES, "initial_simplex": np.vstack([np.zeros(len(_FIRST)), np.eye(len(_FIRST))])},
    )
    return replace(_waiting(best.x, input_s), error=float(np.median(errors(best.x))))


def _input_s(steps: PodSteps) -> float:
    """That a host waits for a batch which lies in memory, in the mean of the hosts: handing it over takes a while."""
    waits = [
        parts_of_step(wall, cpu, steps.step_s)[FOR_INPUT]
        for wall, cpu in zip(steps.phase_s, steps.phase_cpu_s, strict=True)
    ]
    return statistics.fmean(waits)


def _waiting(values: Sequence[float], input_s: float) -> Waiting:
    """From logarithms of what the search begins with, so that none gets negative."""
    meeting_s, spread, device_s, turn, weight = (
        first * float(np.exp(np.clip(value, -5, 5))) for first, value in zip(_FIRST, values, strict=True)
    )
    return Waiting(
        meeting_s=meeting_s, spread=spread, device_s=device_s, input_s=input_s, turn=turn, device_weight=weight
    )


def followed(timeline: Timeline, steps: PodSteps, found: PodCorrections) -> Followed:
    """The steps of a pod with the processor seconds that were measured."""
    hosts = []
    predicted = [timeline.cpu_s(piece) for piece in timeline.pieces]
    for host, phases in enumerate(steps.phase_cpu_s):
        sums: dict[str, float] = {}
        for piece, spent in zip(timeline.pieces, predicted, strict=True):
            sums[str(piece.phase)] = sums.get(str(piece.phase), 0.0) + float(spent[host])
        cpu_s = [
            float(spent[host]) * phases.get(str(piece.phase), 0.0) / max(sums[str(piece.phase)], 1e-30)
            for piece, spent in zip(timeline.pieces, predicted, strict=True)
        ]
        parts = timeline.host_parts(host, cpu_s, waiting=found.waiting)
        hosts.append(replace(parts, device_cpu_s=steps.device_cpu_s[host]))
    return timeline.followed(hosts)


def _errors(found: Followed, steps: PodSteps) -> list[float]:
    """Relative errors of what all hosts wait for, and of the step, which counts as much as five of these."""
    errors = [abs(found.step_s / steps.step_s - 1)] * 5
    least_s = _LEAST_SHARE * steps.step_s
    for predicted, measured, cpu_s in zip(found.phase_s, steps.phase_s, steps.phase_cpu_s, strict=True):
        texts = {str(phase): seconds for phase, seconds in predicted.items()}
        expected = parts_of_step(texts, cpu_s, found.step_s)
        spent = parts_of_step(measured, cpu_s, steps.step_s)
        for name in WAITS:
            if max(spent[name], expected[name]) > least_s:
                errors.append(abs(expected[name] - spent[name]) / max(spent[name], least_s))
    return errors
