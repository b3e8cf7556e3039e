"""A real Prometheus scrapes a run: it takes all that is served, and the dashboard's queries find their series.

A long test. Debian's package `prometheus` is enough; `apt-get download` and `dpkg -x` get its program alone.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podembed.tools.metrics.catalog import CATALOG, PREFIX
from podembed.tools.metrics.reading import RunStream, StreamReader
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.processes import free_port, wait_for
from tests.tools.metrics.test_grafana import DASHBOARD

PROMETHEUS = shutil.which("prometheus")
WAIT_S = 180.0
pytestmark = [
    is_long,
    pytest.mark.skipif(PROMETHEUS is None, reason="found no Prometheus; install Debian's package prometheus"),
]


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a command, until the block ends. An error in the block gets a note with its last words."""
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield process
        except BaseException as error:
            error.add_note(f"{log.name} ended with:\n{log.read_text()[-2000:]}")
            raise
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Server:
    """What a Prometheus server answers."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, what: str, **query: str) -> Any:
        url = f"{self._url}/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        return self.get("query", query=query)["result"]

    def has(self, query: str) -> bool:
        """Whether it finds a series. A server that does not listen yet has none."""
        with contextlib.suppress(OSError):
            return bool(self.series(query))
        return False


def test_prometheus_has_what_the_run_has(tmp_path: Path) -> None:
    port, own_port = free_port(), free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "scrape_configs:\n- job_name: podembed\n  scrape_interval: 1s\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
    )
    train = [
        *(sys.executable, "-m", "podembed", "train", "--job", "synthetic", "--in-process", "--set", "epochs=1000"),
        *("--checkpoint-every", "100", "--eval-every", "100"),
        *("--name", "seen", "--storage", str(tmp_path / "runs"), "--metrics-port", str(port)),
    ]
    serve = [
        *(str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"),
        f"--web.listen-address=127.0.0.1:{own_port}",
    ]
    server = Server(own_port)
    with running(serve, tmp_path / "prometheus.log"), running(train, tmp_path / "run.log") as run:
        for what, query in (
            ("commit", "podembed_committed_step > 0"),
            ("figure of the data", "podembed_feature_distance_ratio"),
            ("figure of the tables", "podembed_table_row_norm"),
        ):
            wait_for(what, lambda query=query: server.has(query), seconds=WAIT_S)
        (target,) = server.get("targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        kinds = {name: one[0]["type"] for name, one in server.get("metadata").items() if name.startswith(PREFIX)}
        # OpenMetrics names a family of counters without `_total`.
        known = {f"{PREFIX}{metric.name}": metric.kind for metric in CATALOG.values()}
        assert kinds == {name: kind for name, kind in known.items() if name in kinds}
        missing = [query for query in queries("seen") if not server.series(query)]
        assert missing == ['podembed_malformed_rows{run="seen"}'], "none was malformed, and of all else something came"
        assert run.poll() is None
        scraped = {name: server.series(f"podembed_{name}[10m]") for name in ("loss", "step", "samples_total")}
    assert_said_by_the_run(scraped, StreamReader(Store(str(tmp_path / "runs" / "seen"))).read())


def queries(run: str) -> Iterator[str]:
    """Those of the dashboard, as Grafana sends them."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"].replace("$run", run).replace("$__rate_interval", "30s").replace("$__range", "10m")


def assert_said_by_the_run(scraped: dict[str, list[dict[str, Any]]], stream: RunStream) -> None:
    for name, found in scraped.items():
        own = {value for _, value in stream.series(name.removesuffix("_total"))}
        (one,) = found
        values = {float(value) for _, value in one["values"]}
        assert one["metric"]["run"] == "seen"
        assert len(values) > 1
        assert values <= own
