"""One of several processes that score over the same memory. `workers.Workers` starts it.

It listens at the port of all of them. What it shall load and answer with comes through its control socket, a line of
JSON each, and so do its replies go back. When that socket ends, so does the worker, and it takes away what the other
process left.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.run.reference import open_published
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.publish.versions import Version, read_version
from podembed.serving.server.listening import DrainingServer, run_server
from podembed.serving.server.replica import Replica
from podembed.serving.server.rows import RowsByKey, RowsByNumber, TableRows
from podembed.serving.server.serve import app_of, score_on_cpu
from podembed.serving.server.server_config import ServerConfig
from podembed.serving.server.worker_memory import opened
from podembed.workers.data.input_errors import InputError
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store

_logger = logging.getLogger(__name__)


class WorkerReplica(Replica):
    """A replica that is told what to do, and whose tables lie in the memory of the process that tells it."""

    def __init__(self, store: Store, *, most_samples: int) -> None:
        super().__init__(store, most_samples=most_samples)
        self._given: Mapping[str, Mapping[str, Any]] = {}

    def load(self, name: str, number: int, tables: Mapping[str, Mapping[str, Any]]) -> bool:
        """Loads a version beside the others. Returns whether scores have the bits that were published.

        Args:
          tables: by name, where their arrays lie.

        Raises:
          ConfigurationError, StorageError, ModelError: it cannot be loaded.
        """
        self._given = tables
        return self._load(read_version(self._store, name), number).has_same_bits

    def answer(self, name: str, number: int) -> None:
        """Answers with a version that is loaded."""
        with self._changed:
            found = next(one for one in self._chain if one.name == name)
            found.number = number
            self.num_swaps += self._current is not None and self._current is not found
            self._current = found
            self._changed.notify_all()

    def drop(self, name: str) -> None:
        """Takes a version out of memory, if it is there."""
        for version in [one for one in self._chain if one.name == name]:
            self._let_go(version)

    def _tables(
        self, version: Version, manifest: Manifest, document: Mapping[str, Any]
    ) -> tuple[dict[str, TableRows], list[Any]]:
        files = {one.name: one for one in manifest.tables}
        tables: dict[str, TableRows] = {}
        for one in document["tables"]:
            name, given = one["name"], self._given[one["name"]]
            rows = RowsByNumber.over(opened(given["values"]), opened(given["places"]))
            tables[name] = (
                rows if one["keys"] is None else RowsByKey.over(rows, files[name], one["keys"], opened(given["lines"]))
            )
        return tables, []


class _Control:
    """The control socket, of the worker's side."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("rb")

    def receive(self) -> dict[str, Any] | None:
        """What to do next; None at the end."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def send(self, reply: Mapping[str, Any]) -> None:
        # Where nobody listens any more, `receive` says so.
        with suppress(OSError):
            self._socket.sendall(json.dumps(reply).encode() + b"\n")


def _carry_out(replica: WorkerReplica, order: Mapping[str, Any]) -> dict[str, Any]:
    """Does what it is told, and says how it went."""
    try:
        match order["do"]:
            case "load":
                return {"has_same_bits": replica.load(order["version"], order["number"], order["tables"])}
            case "answer":
                replica.answer(order["version"], order["number"])
            case "drop":
                replica.drop(order["version"])
            case "tell":
                replica.error = order["error"]
            case other:
                raise ValueError(f"Found order {other!r}. Expected load, answer, drop or tell.")
    except Exception as error:
        _logger.info("could not %s", order, exc_info=True)
        return {"error": str(error) or type(error).__name__, "is_final": isinstance(error, ModelError)}
    return {}


def work(control: _Control) -> None:
    """Answers until the control socket ends, or SIGTERM comes."""
    order = control.receive()
    if order is None:
        return
    config = ServerConfig.from_json(order["config"])
    score_on_cpu()
    store = open_published(order["run"])
    replica = WorkerReplica(store, most_samples=config.most_samples)
    control.send({})
    while replica.current is None:
        told = control.receive()
        if told is None:
            shutil.rmtree(order["series"], ignore_errors=True)
            return
        control.send(_carry_out(replica, told))
    app = app_of(store, replica, config)
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections are spread over all that listen at the port.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((config.host, config.port))

        def obey(server: DrainingServer) -> None:
            while (told := control.receive()) is not None:
                words = {} if app.retrieval is None else {"recommends": app.retrieval.words()}
                control.send(_carry_out(replica, told) | words)
                app.refresh()
            # Nobody tells it anything any more.
            shutil.rmtree(order["series"], ignore_errors=True)
            server.end()

        def begin(server: DrainingServer, address: str) -> None:
            threading.Thread(target=obey, args=(server,), name="control", daemon=True).start()

        run_server(app, config, sockets=[listening], began=begin)


if __name__ == "__main__":
    try:
        work(_Control(int(sys.argv[1])))
    except (ConfigurationError, InputError, ModelError, StorageError) as told:
        # The process that started it says the rest.
        raise SystemExit(str(told)) from None
