"""Measurements of what a window says of learning: figures of its scores, norms of the dense half, learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from podembed.orchestrator.events.progress import WindowTrained
from podembed.orchestrator.metrics.point import Measurement

MOST_RATES = 64
"""Tables whose learning rates are kept, in the job's order."""


def learning(event: WindowTrained) -> Iterator[Measurement]:
    """All but learning rates."""
    for found in event.figures:
        by_task = {"task": found.label}
        yield Measurement("window_auc", found.auc, by_task)
        yield Measurement("window_auc_error", found.auc_error, by_task)
        yield Measurement("window_normalized_entropy", found.normalized_entropy, by_task)
        yield Measurement("window_calibration", found.calibration, by_task)
        yield Measurement("window_positives", found.positives, by_task)
    norms = event.norms
    if norms is None or max(norms.largest_gradient, norms.params or 0.0) <= 0:
        # A model without dense parameters has no norms.
        return
    yield Measurement("dense_gradient_norm", norms.gradient)
    yield Measurement("dense_largest_gradient_norm", norms.largest_gradient)
    if norms.update is not None and norms.params is not None:
        yield Measurement("dense_update_norm", norms.update)
        yield Measurement("dense_parameter_norm", norms.params)


def rates_changed(before: Mapping[str, float], event: WindowTrained) -> dict[str, float]:
    """Learning rates that are not as they were measured last."""
    kept = list(event.rates.items())[:MOST_RATES]
    return {table: rate for table, rate in kept if before.get(table) != rate}
