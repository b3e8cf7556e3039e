"""`PrometheusSink`: the newest measurements at an HTTP port, as Prometheus scrapes them. Imported only where a run asks
for a port, since the client library takes its time.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from podembed.tools.metrics.catalog import CATALOG, PREFIX
from podembed.tools.metrics.point import StreamLine

# Gauges that a window may leave out, such as before it has anything to compare with.
_OF_WINDOWS = {"samples_per_cpu_second"}


class PrometheusSink(Collector):
    """A `Sink`. Mutated: the newest value of each series, and the server.

    A port that is taken is tried again at times. A run that is started again should not end because the one before
    still holds it.

    Args:
      port: 0 takes a free one.
      monotonic_s: a clock.
      address: to listen at.
      run: name of the run, a label of all series.
    """

    flush_s = 10.0

    def __init__(self, port: int, *, run: str, monotonic_s: Callable[[], float], address: str = "0.0.0.0") -> None:
        self.name = f"Prometheus at port {port}"
        self._asked, self._address, self._run = port, address, run
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._server: Any = None
        self._monotonic_s, self._tried_s = monotonic_s, -math.inf

    def listen(self) -> int:
        """Begins to answer, if it does not yet. Returns the port.

        Raises:
          OSError: another program listens there.
        """
        if self._server is None:
            self._tried_s = self._monotonic_s()
            self._server, self._thread = start_http_server(self._asked, addr=self._address, registry=self._registry)
        return self._server.server_port

    def write(self, line: StreamLine) -> None:
        if line.point is None:
            return
        fresh = {(one.name, tuple(sorted(one.labels.items()))): one.value for one in line.point.measurements}
        # What a window does not name any more, such as a host that is gone, is not known; counters stay.
        gone = {name for name, _ in fresh} | (_OF_WINDOWS if line.point.step > line.point.first_step else set())
        gone = {name for name in gone if CATALOG[name].kind == "gauge" and not CATALOG[name].is_kept}
        with self._lock:
            self._values = {key: value for key, value in self._values.items() if key[0] not in gone} | fresh

    def flush(self) -> None:
        """Nothing waits: Prometheus asks when it wants to know. A port that is still taken was reported before."""
        if self._server is None and self._monotonic_s() - self._tried_s >= self.flush_s:
            with contextlib.suppress(OSError):
                self.listen()

    def close(self) -> None:
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """As the client library asks it, in a thread of the server."""
        with self._lock:
            values = dict(self._values)
        for metric in CATALOG.values():
            found = {labels: value for (name, labels), value in values.items() if name == metric.name}
            if not found:
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(f"{PREFIX}{metric.name}", metric.meaning, labels=("run", *sorted(metric.labels)))
            for labels, value in found.items():
                family.add_metric((self._run, *(text for _, text in labels)), value)
            yield family
