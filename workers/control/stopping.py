"""`EarlyStopping`: a job that ends when its evaluations no longer get better."""

from __future__ import annotations

from dataclasses import dataclass

from podembed.workers.declared_types import check_plain_fields


class StoppingError(ValueError):
    """A policy that cannot be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """Ends training after so many evaluations in a row that are not better than the best one.

    What was the best, and how long ago, is part of every commit. So a run that is resumed, or that lost hosts, stops
    where it would have stopped anyway. It can be resumed with more patience (`--set patience=5`, where the job has such
    an argument).

    Attributes:
      patience: evaluations in a row without a better one.
      metric: metric by which evaluations are compared: `auc`, `log_loss`, `loss`, or the name of one of
        `JobConfig.metrics`. None takes `CheckpointConfig.metric`, or its default.
      min_delta: by how much the metric must be better to count, at least 0.
    """

    patience: int = 3
    metric: str | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_plain_fields(self, StoppingError)
        if self.patience < 1:
            raise StoppingError(f"Found patience={self.patience} in EarlyStopping. Expected at least 1 evaluation.")
        if not 0 <= self.min_delta < float("inf"):
            raise StoppingError(f"Found min_delta={self.min_delta} in EarlyStopping. Expected 0 or more.")
