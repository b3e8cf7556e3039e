"""`ServerMetrics`: what a server measures of itself, as Prometheus scrapes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import MutexValue, ValueClass

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.serving.artifact.exported_model import Samples
from podembed.serving.server.held_versions import HeldVersion, HeldVersions
from podembed.serving.server.replica import Replica, ServedVersion
from podembed.serving.server.rows import RowsByKey
from podembed.serving.server.scorer import RunWatcher

PREFIX = "podembed_serve"
# What of several workers counts; of the others the least.
_MODES: dict[str, Any] = {"commit_age_seconds": "livemax", "version_age_seconds": "livemax", "swaps_total": "livemax"}
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SAMPLES = (1, 8, 32, 64, 128, 256, 512, 1024, 4096)


class RequestMetrics:
    """Requests, and the version that answers. docs/serving.md has each series."""

    def __init__(self, versions: HeldVersions[Any]) -> None:
        self._versions = versions
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            f"{PREFIX}_requests", "Requests by path and status", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            f"{PREFIX}_request_seconds", "From the request to its answer", ["path"], buckets=_SECONDS, registry=registry
        )
        self._ids = Counter(
            f"{PREFIX}_ids", "Ids that were looked up in tables with a capacity", ["table"], registry=registry
        )
        self._unknown = Counter(f"{PREFIX}_unknown_ids", "Of these, those without a row", ["table"], registry=registry)
        gauges = {
            "step": "Step of the commit that answers",
            "pointer": "Number of the pointer that offered it",
            "commit_age_seconds": "Age of the commit that answers",
            "version_age_seconds": "How long this version has answered",
            "swaps_total": "Versions that took over since the start",
            "follows": "1 where the newest pointer answers, 0 where it cannot be loaded",
        }
        self._gauges = {
            name: Gauge(f"{PREFIX}_{name}", text, registry=registry, multiprocess_mode=_MODES.get(name, "livemin"))
            for name, text in gauges.items()
        }

    def count_ids(self, version: HeldVersion) -> None:
        """Takes what tables with a capacity counted since the last call."""
        for name, table in version.tables.items():
            if isinstance(table, RowsByKey):
                asked, known = table.take_counts()
                self._ids.labels(name).inc(asked)
                self._unknown.labels(name).inc(asked - known)

    def look(self) -> None:
        """Brings up to date what is said of the version that answers."""
        version, now_s = self._versions.current, SYSTEM_CLOCK.wall_s()
        if version is not None:
            values = {
                "step": version.manifest.step,
                "pointer": version.number,
                "commit_age_seconds": now_s - version.manifest.created_unix_s,
                "version_age_seconds": now_s - version.loaded_unix_s,
                "swaps_total": self._versions.num_swaps,
                "follows": float(self._versions.error is None),
            }
            for name, value in values.items():
                self._gauges[name].set(value)

    def text(self) -> bytes:
        """All series; of all workers, if this is one of several."""
        registry = self._registry
        if ValueClass is not MutexValue:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)


class ServerMetrics(RequestMetrics, RunWatcher):
    """Of a process that scores."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        registry = self._registry
        self._samples = Counter(f"{PREFIX}_samples", "Samples that were scored", registry=registry)
        self._run_samples = Histogram(
            f"{PREFIX}_run_samples", "Samples that were scored together", buckets=_SAMPLES, registry=registry
        )
        self._run_seconds = Histogram(
            f"{PREFIX}_run_seconds", "Reading columns and running the model", buckets=_SECONDS, registry=registry
        )
        self.waiting = Gauge(
            f"{PREFIX}_waiting_samples", "Samples in the queue", registry=registry, multiprocess_mode="livesum"
        )
        self.oldest = Gauge(
            f"{PREFIX}_waiting_seconds",
            "How long the first request has waited",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.recorded = Gauge(
            f"{PREFIX}_recorded_total", "Requests that were recorded", registry=registry, multiprocess_mode="sum"
        )
        self.record_dropped = Gauge(
            f"{PREFIX}_record_dropped_total",
            "Requests that could not be recorded",
            registry=registry,
            multiprocess_mode="sum",
        )

    def run(self, version: ServedVersion, requests: Sequence[Samples], seconds: float) -> None:
        count = sum(one.num_samples for one in requests)
        self._samples.inc(count)
        self._run_samples.observe(count)
        self._run_seconds.observe(seconds)
        self.count_ids(version)
