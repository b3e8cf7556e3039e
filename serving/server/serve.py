"""`serve`: a process that answers with the published versions of a run, until it is told to end."""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.reference import open_published
from podembed.serving.server.app import App
from podembed.serving.server.endpoints import Endpoints, Limits
from podembed.serving.server.held_versions import HeldVersions, NotYet
from podembed.serving.server.recorder import RequestLog
from podembed.serving.server.replica import MOST_SAMPLES, Replica
from podembed.serving.server.retrieval import Retrieval
from podembed.serving.server.shard_server import ShardServer, ShardVersions
from podembed.serving.server.shards import Shards
from podembed.serving.server.shares import ShardPlace
from podembed.workers.storage.store import Store

POLL_S = 1.0
START_S = 600.0
"""How long a process that scores waits for its shards before it gives up."""
SWITCH_S = 0.0005
_OWN_FILES = 128
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How a server listens, and what it lets clients ask for.

    Attributes:
      host: address to listen at. The default can be reached from this machine alone.
      port: port; 0 takes a free one.
      name: name of the model in paths; None for that of its job.
      token: bearer token that clients must send, or None.
      certificate, key: files of TLS in PEM, or None.
      poll_s: seconds between looks for a newer pointer.
      drain_s: seconds after SIGTERM in which it answers but says that it is not ready, so that balancers turn away.
      most_samples: samples of one run of the program.
      limits: of one request.
      record: folder for recorded requests, or None.
      record_share: share of requests that are recorded.
      shard: which share of the tables to hold, for processes that score; None to score.
      shards: URLs of all shards, where they hold the tables.
      recommend: feature of the items that it recommends, or None.
      items: Parquet file with a row for each item, or None.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    poll_s: float = POLL_S
    drain_s: float = 0.0
    most_samples: int = MOST_SAMPLES
    limits: Limits = field(default_factory=Limits)
    record: str | None = None
    record_share: float = 0.01
    shard: ShardPlace | None = None
    shards: tuple[str, ...] = ()
    recommend: str | None = None
    items: str | None = None

    def __post_init__(self) -> None:
        if self.shard is not None and self.shards:
            raise ConfigurationError(
                "Found --shard beside --shards. Expected one of them: a process holds a share of the tables, or scores "
                "with the rows of others. Leave out one."
            )
        for name in ("record", "recommend", "items"):
            if self.shard is not None and getattr(self, name) is not None:
                raise ConfigurationError(
                    f"Found --{name} beside --shard. Expected it where requests are scored. Pass it to the process "
                    "with --shards."
                )
        if not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"Found port {self.port}. Expected 0 to 65535. Take 0 for any free one.")
        for name, value in (("poll_s", self.poll_s), ("timeout_s", self.limits.timeout_s)):
            if not 0 < value < float("inf"):
                raise ConfigurationError(f"Found {name}={value}. Expected seconds above 0. Leave it out for the usual.")
        if not 0 <= self.drain_s < float("inf"):
            raise ConfigurationError(f"Found drain_s={self.drain_s}. Expected seconds. Leave it out for none.")
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise ConfigurationError(
                f"Found name {self.name!r}. Expected letters, digits, '_', '.' and '-', as it stands in paths. Choose "
                "another one."
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("Found a certificate or a key alone. Expected both. Pass --certificate and --key.")
        for path in (self.certificate, self.key):
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigurationError(f"Found no way to read {path}. Expected a file in PEM. Correct the path.")


class Follower:
    """A thread that looks for newer pointers."""

    def __init__(self, versions: HeldVersions[Any], *, poll_s: float) -> None:
        self._versions, self._poll_s = versions, poll_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ends.wait(self._poll_s):
            try:
                self._versions.follow()
            except Exception:
                # The version that answers goes on to answer, whatever is wrong with the next.
                _logger.exception("found an error in the next version")


class _Server(uvicorn.Server):
    """uvicorn, which drains first."""

    def __init__(self, config: uvicorn.Config, app: Endpoints, drain_s: float, told: Callable[[str], None]) -> None:
        super().__init__(config)
        self._app, self._drain_s, self._told, self._is_told = app, drain_s, told, False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Ends in good order, so the process ends without an error. A second signal does not wait for clients."""
        if self._is_told:
            self.should_exit = self.force_exit = True
        elif self._drain_s:
            self._app.is_draining = True
            timer = threading.Timer(self._drain_s, self._end)
            timer.daemon = True
            timer.start()
        else:
            self._end()
        self._is_told = True

    def _end(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            listening = self.servers[0].sockets[0].getsockname()
            scheme = "https" if self.config.is_ssl else "http"
            host = f"[{listening[0]}]" if ":" in listening[0] else listening[0]
            self._told(f"{scheme}://{host}:{listening[1]}")


def open_app(store: Store, config: ServerConfig) -> tuple[App, Replica]:
    """The program of a server that scores, with its first version loaded. Waits for shards.

    Raises:
      ConfigurationError, StorageError, ModelError: nothing is published, or it cannot be loaded.
    """
    shards = Shards(config.shards, token=config.token) if config.shards else None
    replica = Replica(store, most_samples=config.most_samples, shards=shards)
    _follow_first(replica, config.poll_s)
    assert replica.current is not None
    name = config.name or str(replica.current.model.manifest["job"])
    recorder = None
    if config.record is not None:
        recorder = RequestLog(config.record, share=config.record_share)
    retrieval = None
    if config.recommend is not None or config.items is not None:
        retrieval = Retrieval(store, replica, feature=config.recommend, items=config.items)
    app = App(replica, name=name, limits=config.limits, token=config.token, recorder=recorder, retrieval=retrieval)
    return app, replica


def _follow_first(replica: Replica, poll_s: float) -> None:
    until_s = SYSTEM_CLOCK.monotonic_s() + START_S
    told = ""
    while True:
        try:
            replica.follow()
            return
        except NotYet as error:
            if SYSTEM_CLOCK.monotonic_s() >= until_s:
                raise ConfigurationError(str(error)) from error
            if str(error) != told:
                _logger.warning("waits: %s", error)
            told = str(error)
        SYSTEM_CLOCK.sleep(poll_s)


def asgi_app(run: str | os.PathLike[str], config: ServerConfig | None = None) -> Starlette:
    """The server as an ASGI program, for a process that has a server of HTTP: Ray Serve, gunicorn, hypercorn. It
    follows newer versions by itself, until the process ends.

    Raises:
      ConfigurationError, StorageError, ModelError: nothing is published, or it cannot be loaded.
    """
    config = config or ServerConfig()
    app, versions, _ = _opened(open_published(os.fspath(run)), config)
    sys.setswitchinterval(SWITCH_S)
    Follower(versions, poll_s=config.poll_s)
    return app.asgi()


def _opened(store: Store, config: ServerConfig) -> tuple[Endpoints, HeldVersions[Any], str]:
    """The program, its versions, and what a person is told of the first."""
    if config.shard is not None:
        held = ShardVersions(store, config.shard)
        held.follow()
        place = config.shard
        return ShardServer(held, limits=config.limits, token=config.token), held, f"shard {place.index}/{place.count}"
    app, replica = open_app(store, config)
    assert replica.current is not None
    is_same = replica.current.has_same_bits
    return app, replica, "same bits as published" if is_same else "close to what was published, not the same bits"


def serve(store: Store, config: ServerConfig, *, told: Callable[[str], None] = print) -> None:
    """Answers until SIGTERM or Ctrl-C, then lets running requests end.

    Args:
      told: gets each line for the person who started it.

    Raises:
      ConfigurationError, StorageError, ModelError: as `open_app`, or the port is taken.
    """
    began_s = SYSTEM_CLOCK.monotonic_s()
    app, versions, what = _opened(store, config)
    version = versions.current
    assert version is not None
    seconds = SYSTEM_CLOCK.monotonic_s() - began_s
    told(f"{version.name}: step {version.manifest.step:,}, loaded in {seconds:.1f} s, {what}")
    if isinstance(app, App) and app.retrieval is not None:
        told(app.retrieval.words())
    # The thread that scores holds the interpreter for as long as it may. With the usual 5 ms, each request would wait
    # so long to be read, and again to be answered.
    sys.setswitchinterval(SWITCH_S)
    follower = Follower(versions, poll_s=config.poll_s)
    settings = uvicorn.Config(
        app.asgi(),
        host=config.host,
        port=config.port,
        http="httptools",
        log_level="warning",
        access_log=False,
        ssl_certfile=config.certificate,
        ssl_keyfile=config.key,
        lifespan="off",
        # A client that does not read its answers must not keep the process from ending.
        timeout_graceful_shutdown=max(1, round(config.limits.timeout_s)),
        # Else a machine without free files could not even look for a newer version.
        limit_concurrency=max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OWN_FILES),
    )
    server = _Server(settings, app, config.drain_s, lambda address: told(f"answers at {address} (Ctrl-C ends it)"))
    try:
        server.run()
    except SystemExit as error:
        # uvicorn has said why in a line of its own.
        raise ConfigurationError(
            f"Found no way to listen at {config.host}:{config.port}. Expected an address of this machine and a free "
            "port. Choose another --host or --port, or port 0 for any."
        ) from error
    finally:
        follower.close()
        app.close()
