"""`MetricsConfig`: where a run's measurements go, and `TracedSteps`: the steps of which a trace is requested."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.configuration_error import ConfigurationError
from podembed.workers.declared_types import check_plain_fields

_LAST_PORT = 65535
_TEXT = re.compile(r"(\d{1,15}):(\d{1,15})(\+jax)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSteps:
    """The steps `first` to `last - 1` of a trace, counted from 0, as text `first:last`, or `first:last+jax`.

    Attributes:
      with_jax: merge what JAX's own profiler sees of the devices.
    """

    first: int
    last: int
    with_jax: bool = False

    @staticmethod
    def parse(text: str) -> TracedSteps:
        """Raises:
        ConfigurationError: it is no range of steps, or an empty one.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ConfigurationError(
                f"Found trace={text!r}. Expected two steps, FIRST:LAST, of which the last is not traced any more. "
                "20:25 traces the five steps 20, 21, 22, 23 and 24. 20:25+jax adds JAX's own profile of the devices."
            )
        first, last = int(found[1]), int(found[2])
        if first >= last:
            raise ConfigurationError(
                f"Found trace={text!r}, which holds no step. Expected a first step below the last one, which is not "
                f"traced any more. {first}:{first + 5} traces the five steps from {first} on."
            )
        return TracedSteps(first=first, last=last, with_jax=found[3] is not None)

    def __str__(self) -> str:
        return f"{self.first}:{self.last}" + ("+jax" if self.with_jax else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """The places where a run's measurements go. None of it changes a number of the run, and none of it can stop it.

    Attributes:
      in_run: write them to `metrics/` in the run's folder, at most 64 MiB. `podembed top`, `health` and `report` read
        them there.
      port: port of the driver's machine, where Prometheus scrapes them; 0 takes a free one, None listens nowhere.
      tensorboard: a folder of the driver's machine for TensorBoard's event files; None writes none.
      tensorboard_all: write every series there, of each host, table and input, and not only about 30 that sum them up.
      ray: make them metrics of Ray as well. None does so in a cluster that others started, where its metrics are
        collected; one of the program's own has no collector.
      trace: steps of which a trace is written to `traces/` in the run's folder, such as `"20:25"` for steps 20 to 24.
        `"20:25+jax"` adds JAX's own profile of the devices.
      on_point: called with each `podembed.Point`, in a thread of its own.
    """

    in_run: bool = True
    port: int | None = None
    tensorboard: str | None = None
    tensorboard_all: bool = False
    ray: bool | None = None
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
        if self.tensorboard_all and self.tensorboard is None:
            raise ConfigurationError(
                "Found tensorboard_all=True, and tensorboard names no folder. Expected both. Name one, such as "
                ".runs/tensorboard/clicks."
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
