"""`RaySink`: measurements as metrics of Ray, which each node of a cluster serves beside those of Ray itself. Imported
only where a run is in such a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from podembed.tools.metrics.catalog import CATALOG
from podembed.tools.metrics.point import Measurement, StreamLine


class RaySink:
    """A `Sink`. Mutated: Ray's metrics, and what its counters have.

    Ray puts `ray_` before the names, and labels of its own beside those of here. Its counters take differences. It
    forgets a gauge that was not set for some 20 s, so what was measured last is said again. A value that a later window
    leaves out, such as that of a host that is gone, is not.

    Args:
      run: name of the run, a label of all series.
      monotonic_s: a clock.
    """

    flush_s = 10.0
    name = "Ray's metrics"

    def __init__(self, *, run: str, monotonic_s: Callable[[], float]) -> None:
        self._run, self._monotonic_s = run, monotonic_s
        # Gauge → labels → value, and when all of them were said.
        self._newest: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self._said_s = monotonic_s()
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def write(self, line: StreamLine) -> None:
        """Raises:
        ConnectionError: this process is in no cluster.
        """
        if line.point is None:
            return
        import ray

        if not ray.is_initialized():
            raise ConnectionError(
                "found no Ray cluster that the driver is in; expected one, so leave MetricsConfig(ray=True) out where "
                "hosts are in the driver's process"
            )
        for name in {one.name for one in line.point.measurements if not one.metric.is_kept}:
            self._newest[name] = {}
        for one in line.point.measurements:
            if math.isfinite(one.value):
                self._record(one)

    def _record(self, one: Measurement) -> None:
        tags = {"run": self._run, **one.labels}
        metric, labels = self._metric(one.name), tuple(sorted(one.labels.items()))
        if one.metric.kind == "gauge":
            metric.set(float(one.value), tags=tags)
            self._newest.setdefault(one.name, {})[labels] = float(one.value)
            return
        key = (one.name, labels)
        more = one.value - self._counted.get(key, 0.0)
        # Ray refuses to count nothing.
        if more > 0:
            metric.inc(float(more), tags=tags)
            self._counted[key] = one.value

    def _metric(self, name: str) -> Any:
        if name not in self._metrics:
            from ray.util.metrics import Counter, Gauge

            metric = CATALOG[name]
            kind = Counter if metric.kind == "counter" else Gauge
            self._metrics[name] = kind(metric.full_name, metric.meaning, tag_keys=("run", *metric.labels))
        return self._metrics[name]

    def flush(self) -> None:
        """Repeats the last measurements every 10 s."""
        if self._monotonic_s() - self._said_s < self.flush_s:
            return
        self._said_s = self._monotonic_s()
        for name, values in self._newest.items():
            for labels, value in values.items():
                self._metrics[name].set(value, tags={"run": self._run, **dict(labels)})

    def close(self) -> None:
        """Nothing is open."""
