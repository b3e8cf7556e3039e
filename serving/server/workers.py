"""`Workers`: several processes that score over the same memory, and the one that tells them what with.

That one follows the pointers, reads rows into memory which all map, and lets the workers load a version before one of
them answers with it. It replaces a worker that ends. It answers no requests itself.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.server.held_versions import HeldVersion, HeldVersions
from podembed.serving.server.listening import ending_at_once, port_taken
from podembed.serving.server.server_config import ServerConfig
from podembed.serving.server.worker_memory import WorkerMemory
from podembed.workers.processors import XLA_THREADS, number_of_processors
from podembed.workers.storage.store import Store

_LOAD_S = 300.0
_REPLY_S = 20.0
_LOOK_S = 0.5
_END_S = 10.0
_logger = logging.getLogger(__name__)


class _Gone(Exception):
    """A worker ended, or does not reply."""


class _Worker:
    """A process, as the one that tells it what to do has it. Mutated: what it knows.

    Args:
      series: folder through which workers share what they measure.
      ends: set when nothing is waited for any more.

    Attributes:
      loaded: names of the versions that it has.
      recommends: what it says of its items, for people; empty where it recommends none.
    """

    def __init__(self, run: str, config: ServerConfig, series: str, ends: threading.Event) -> None:
        self._ends = ends
        self._socket, other = socket.socketpair()
        share = max(1, number_of_processors() // config.workers)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "podembed.serving.server.worker", str(other.fileno())],
                pass_fds=[other.fileno()],
                # Ctrl-C of a terminal is for the process that tells it to end.
                start_new_session=True,
                # By itself each worker would have a thread for each processor, and lose time between them.
                env={XLA_THREADS: str(share), **os.environ, "PROMETHEUS_MULTIPROC_DIR": series},
            )
        self._received = b""
        self.loaded: set[str] = set()
        self._answers: tuple[str, int] | None = None
        self._is_up = False
        self.recommends = ""
        self._send({"run": run, "config": asdict(config), "series": series})

    def begin_load(self, order: Mapping[str, Any]) -> None:
        """Lets it load a version, whose reply `end_load` waits for.

        Raises:
          _Gone: as `_reply`.
        """
        if not self._is_up:
            self._reply(_LOAD_S)
            self._is_up = True
        self._send(order)

    def end_load(self, name: str) -> dict[str, Any]:
        """Its reply.

        Raises:
          _Gone: as `_reply`.
        """
        reply = self._reply(_LOAD_S)
        if "error" not in reply:
            self.loaded.add(name)
        return reply

    def answer(self, name: str, number: int, error: str | None) -> None:
        """Lets it answer with a version that it has loaded, and listen.

        Args:
          error: why a newer pointer is not followed, or None.

        Raises:
          _Gone: as `_reply`.
        """
        if self._answers != (name, number):
            self._ask({"do": "answer", "version": name, "number": number})
            self._answers = name, number
        # It replies once it listens, and before that it may make an index of items.
        self._ask({"do": "tell", "error": error}, timeout_s=_LOAD_S)

    def drop(self, name: str) -> None:
        """Takes a version out of its memory.

        Raises:
          _Gone: as `_reply`.
        """
        if name in self.loaded:
            self._ask({"do": "drop", "version": name})
            self.loaded.remove(name)

    def close(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def _ask(self, order: Mapping[str, Any], *, timeout_s: float = _REPLY_S) -> None:
        self._send(order)
        reply = self._reply(timeout_s)
        if error := reply.get("error"):
            raise _Gone(f"could not {order['do']}: {error}")
        self.recommends = reply.get("recommends", "")

    def _send(self, order: Mapping[str, Any]) -> None:
        try:
            self._socket.settimeout(_REPLY_S)
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise _Gone(f"ended with code {self._code()}") from error

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        """Raises:
        _Gone: it ended, or does not reply in time.
        """
        until_s = SYSTEM_CLOCK.monotonic_s() + timeout_s
        self._socket.settimeout(_LOOK_S)
        while b"\n" not in self._received:
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError as error:
                if SYSTEM_CLOCK.monotonic_s() >= until_s or self._ends.is_set():
                    raise _Gone(f"did not reply within {timeout_s:g} s") from error
                continue
            except OSError:
                data = b""
            if not data:
                raise _Gone(f"ended with code {self._code()}")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _code(self) -> int | None:
        try:
            return self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None


class Workers(HeldVersions[HeldVersion]):
    """See the module. As `HeldVersions`: `current` is what all workers answer with.

    Args:
      run: as the workers open it.
      config: of each worker; its port is not 0.
      series: folder through which workers share what they measure.
      ends: set when nothing is waited for any more.
    """

    def __init__(self, store: Store, run: str, config: ServerConfig, series: str, ends: threading.Event) -> None:
        # Tables take a descriptor or two each.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._shared = WorkerMemory()
        super().__init__(store, memory=self._shared)
        self._run, self._config, self._series, self._ends = run, config, series, ends
        self._workers: list[_Worker] = []
        self.has_same_bits = True

    def start(self) -> None:
        """Starts all workers; they listen when this returns.

        Raises:
          ConfigurationError, StorageError, ModelError: nothing is published, it cannot be loaded, or a worker ended.
        """
        # They import what they need while this process reads.
        self._workers = [self._another() for _ in range(self._config.workers)]
        self.follow()
        for worker in self._workers:
            try:
                self._announce(worker)
            except _Gone as error:
                raise ConfigurationError(
                    f"Found a worker that {error}. Expected it to listen. Its lines above say why."
                ) from error

    @property
    def recommends(self) -> str:
        """What the first worker says of its items, for people; empty where they recommend none."""
        return self._workers[0].recommends

    def tend(self) -> None:
        """Follows the pointers, and replaces workers that ended."""
        for at, worker in enumerate(self._workers):
            if worker.process.poll() is not None:
                _logger.warning("worker %d is gone; another one takes its place", worker.process.pid)
                worker.close()
                mark_process_dead(worker.process.pid, self._series)
                self._workers[at] = self._another()
        self.follow()
        for worker in self._workers:
            self._try(worker, self._announce)

    def _another(self) -> _Worker:
        return _Worker(self._run, self._config, self._series, self._ends)

    def tell_to_end(self) -> None:
        """As a signal tells it to a server without workers. The second time running requests are cut off."""
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)

    def close(self, *, seconds: float) -> None:
        """Waits for workers that were told to end, and ends them after that."""
        until_s = SYSTEM_CLOCK.monotonic_s() + seconds
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, until_s - SYSTEM_CLOCK.monotonic_s()))
            except subprocess.TimeoutExpired:
                _logger.warning("worker %d did not end within %g s", worker.process.pid, seconds)
            worker.close()

    def _ready(self, held: HeldVersion, document: Mapping[str, Any]) -> HeldVersion:
        order = self._loading(held)
        replies: list[dict[str, Any]] = []
        asked = [worker for worker in self._workers if self._try(worker, lambda one: one.begin_load(order))]
        for worker in asked:
            self._try(worker, lambda one: replies.append(one.end_load(held.name)))
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors or not replies:
            self._drop(held.name)
            # Of a storage it may pass, and then the version is loaded again.
            kind = ModelError if any(reply.get("is_final") for reply in replies) else ConfigurationError
            raise kind(errors[0] if errors else f"Found no worker that loaded {held.name}. Expected all to.")
        self.has_same_bits = all(reply["has_same_bits"] for reply in replies)
        return held

    def _let_go(self, version: HeldVersion) -> None:
        super()._let_go(version)
        self._drop(version.name)

    def _drop(self, name: str) -> None:
        """No worker reads the rows of a version after this."""
        for worker in self._workers:
            self._try(worker, lambda one: one.drop(name))

    def _announce(self, worker: _Worker) -> None:
        """Lets a worker answer with the version that counts.

        Raises:
          _Gone: it does not.
        """
        current = self._current
        assert current is not None
        if current.name not in worker.loaded:
            worker.begin_load(self._loading(current))
            if error := worker.end_load(current.name).get("error"):
                raise _Gone(f"could not load {current.name}: {error}")
        worker.answer(current.name, current.number, self.error)

    def _try(self, worker: _Worker, action: Callable[[_Worker], None]) -> bool:
        """Does something with a worker, or ends one that does not go along; `tend` replaces it."""
        if worker.process.poll() is not None:
            return False
        try:
            action(worker)
        except _Gone as error:
            _logger.warning("worker %d %s", worker.process.pid, error)
            worker.process.kill()
            worker.process.wait()
            return False
        return True

    def _loading(self, version: HeldVersion) -> dict[str, Any]:
        """The order to load a version."""
        place_of, tables = self._shared.place_of, {}
        for name, table in version.tables.items():
            tables[name] = {kind: place_of(array) for kind, array in table.arrays().items()}
        return {"do": "load", "version": version.name, "number": version.number, "tables": tables}


def serve_with_workers(store: Store, run: str, config: ServerConfig, *, told: Callable[[str], None]) -> None:
    """As `serve`, with several processes.

    Raises:
      ConfigurationError, StorageError, ModelError: as `serve`, or this is no Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigurationError(
            f"Found {config.workers} workers on {sys.platform}. Expected Linux, where processes share memory. Leave "
            "out --workers."
        )
    began_s = SYSTEM_CLOCK.monotonic_s()
    with _reserved(config) as port, tempfile.TemporaryDirectory(prefix="podembed-serve-") as series:
        ends, again = threading.Event(), threading.Event()
        workers = Workers(store, run, replace(config, port=port), series, ends)

        def end(*_: Any) -> None:
            (again if ends.is_set() else ends).set()

        for sent in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sent, end)
        try:
            with ending_at_once(partial(shutil.rmtree, series, ignore_errors=True)):
                workers.start()
            version = workers.current
            assert version is not None
            seconds = SYSTEM_CLOCK.monotonic_s() - began_s
            bits = "same bits as published" if workers.has_same_bits else "close to what was published"
            told(f"{version.name}: step {version.manifest.step:,}, loaded in {seconds:.1f} s, {bits}")
            if workers.recommends:
                told(f"each worker {workers.recommends}")
            scheme, host = "https" if config.certificate else "http", config.host
            told(f"answers at {scheme}://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
            while not ends.wait(config.poll_s):
                workers.tend()
        finally:
            workers.tell_to_end()
            waiter = threading.Thread(target=_tell_again, args=(again, workers), daemon=True)
            waiter.start()
            workers.close(seconds=config.drain_s + config.limits.timeout_s + _END_S)


def _tell_again(again: threading.Event, workers: Workers) -> None:
    again.wait()
    workers.tell_to_end()


@contextmanager
def _reserved(config: ServerConfig) -> Iterator[int]:
    """The port at which all workers listen; it stays theirs until this ends.

    Raises:
      ConfigurationError: another process listens there.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as alone, socket.socket(family) as shared:
        try:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Without this look, workers of another server would be joined.
            alone.bind((config.host, config.port))
            port = alone.getsockname()[1]
            alone.close()
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((config.host, port))
        except OSError as error:
            raise port_taken(config) from error
        yield port
