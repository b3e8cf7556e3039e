"""`MetricsConfig`: where a run's measurements go."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.configuration_error import ConfigurationError
from podembed.orchestrator.api.traced_steps import TracedSteps
from podembed.workers.declared_types import check_plain_fields

_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where a run's measurements go. None of it changes a number of the run, and none of it can stop it.

    Attributes:
      in_run: write them to `metrics/` in the run's folder, at most 64 MiB. `podembed top`, `health` and `report` read
        them there.
      port: of the driver's machine, where Prometheus scrapes them; 0 takes a free one, None listens nowhere.
      tensorboard: a folder of the driver's machine for TensorBoard's event files; None writes none.
      trace: steps of which a trace is written to `traces/` in the run's folder, such as `"20:25"` for steps 20 to 24.
      on_point: called with each `podembed.Point`, in a thread of its own.
    """

    in_run: bool = True
    port: int | None = None
    tensorboard: str | None = None
    on_point: Callable[[Any], None] | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        check_plain_fields(self, ConfigurationError)
        if self.port is not None and not 0 <= self.port <= _LAST_PORT:
            raise ConfigurationError(
                f"Found port={self.port}. Expected a TCP port from 1 to {_LAST_PORT}, 0 for a free one, or None. "
                "Choose a free port."
            )
        if self.trace is not None:
            TracedSteps.parse(self.trace)
        if self.tensorboard == "":
            raise ConfigurationError(
                "Found tensorboard=''. Expected a folder, or None. Name one, such as .runs/tensorboard/clicks."
            )
        # Without importing it, which takes its time.
        if self.tensorboard is not None and importlib.util.find_spec("tensorboardX") is None:
            raise ConfigurationError(
                f"Found tensorboard={self.tensorboard!r}, and no package tensorboardX, which writes event files. "
                "Expected both. Type: pip install 'podembed[trackers]'"
            )
        if self.on_point is not None and not callable(self.on_point):
            raise ConfigurationError(
                f"Found on_point={self.on_point!r}. Expected a function of a Point, or None. Pass the function itself."
            )

    @property
    def traced(self) -> TracedSteps | None:
        """The steps of `trace`."""
        return None if self.trace is None else TracedSteps.parse(self.trace)
