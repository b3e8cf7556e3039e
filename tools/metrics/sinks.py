"""`measuring`: the sinks that a run asks for, in the way of its driver's events."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.api.metrics_config import MetricsConfig
from podembed.orchestrator.events.event import Emit, Event
from podembed.orchestrator.events.run import MetricsServed, SinkFailed
from podembed.tools.metrics.hub import MetricsHub, PointJudge, Sink
from podembed.tools.metrics.measurer import Measurer
from podembed.tools.metrics.point import Point, StreamLine
from podembed.tools.metrics.segments import Segments
from podembed.workers.storage.store import Store

if TYPE_CHECKING:
    from podembed.tools.metrics.prometheus import PrometheusSink


@contextlib.contextmanager
def measuring(
    config: MetricsConfig, store: Store, emit: Emit, *, watch: PointJudge | None = None, is_in_cluster: bool = False
) -> Iterator[Emit]:
    """Sends a driver's events to the sinks from now on, and then to `emit`.

    Args:
      store: store of the run.
      watch: watch as in `MetricsHub`.
      is_in_cluster: whether the run joins a Ray cluster that others started.
    """
    clock = SYSTEM_CLOCK
    name = store.location.rstrip("/").rsplit("/", 1)[-1]
    sinks: list[Sink] = []
    served = None
    if config.in_run:
        driver = f"{int(clock.wall_s() * 1e3):013d}-{secrets.token_hex(2)}"
        sinks.append(Segments(store, driver=driver, monotonic_s=clock.monotonic_s))
    if config.port is not None:
        from podembed.tools.metrics.prometheus import PrometheusSink

        served = PrometheusSink(config.port, run=name, monotonic_s=clock.monotonic_s)
        sinks.append(served)
    if config.tensorboard is not None:
        from podembed.tools.metrics.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(config.tensorboard, is_full=config.tensorboard_all))
    if config.ray or (config.ray is None and is_in_cluster):
        from podembed.tools.metrics.ray_metrics import RaySink

        sinks.append(RaySink(run=name, monotonic_s=clock.monotonic_s))
    if config.on_point is not None:
        sinks.append(CallbackSink(config.on_point))
    severities = watch.severities if watch is not None else {}
    measurer = Measurer(monotonic_s=clock.monotonic_s, wall_s=clock.wall_s, severities=severities)
    with MetricsHub(emit, sinks, measurer=measurer, wall_s=clock.wall_s, watch=watch) as hub:
        if served is not None:
            hub.emit(_begun(served))
        yield hub.emit


def _begun(sink: PrometheusSink) -> Event:
    try:
        return MetricsServed(port=sink.listen())
    except OSError as error:
        return SinkFailed(sink=sink.name, error=f"{error.strerror}, tried again every {sink.flush_s:.0f} s", dropped=0)


class CallbackSink:
    """A `Sink` that calls a function with each point.

    Args:
      on_point: called in a thread of its own. What it raises is reported once, and the run goes on.
    """

    flush_s = 60.0

    def __init__(self, on_point: Callable[[Point], None]) -> None:
        self.name = f"the function {getattr(on_point, '__qualname__', type(on_point).__name__)}"
        self._on_point = on_point

    def write(self, line: StreamLine) -> None:
        if line.point is not None:
            self._on_point(line.point)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""
