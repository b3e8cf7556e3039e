"""`serve`: a process that answers with the published versions of a run, until it is told to end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from starlette.applications import Starlette

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.reference import open_published
from podembed.serving.server.app import App
from podembed.serving.server.endpoints import Endpoints
from podembed.serving.server.held_versions import HeldVersions, NotYet
from podembed.serving.server.listening import answer_promptly, ending_at_once, run_server
from podembed.serving.server.recorder import RequestLog
from podembed.serving.server.replica import Replica
from podembed.serving.server.retrieval import Retrieval
from podembed.serving.server.server_config import ServerConfig
from podembed.serving.server.shard_server import ShardServer, ShardVersions
from podembed.serving.server.shards import ShardAway, Shards
from podembed.serving.server.workers import serve_with_workers
from podembed.workers.storage.store import Store

START_S = 600.0
"""How long a process that scores waits for its shards before it gives up."""
_logger = logging.getLogger(__name__)


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


def open_app(store: Store, config: ServerConfig) -> tuple[App, Replica]:
    """The program of a server that scores, with its first version loaded. Waits for shards.

    Raises:
      ConfigurationError, StorageError, ModelError: nothing is published, or it cannot be loaded.
    """
    shards = Shards(config.shards, token=config.token) if config.shards else None
    replica = Replica(store, most_samples=config.most_samples, shards=shards)
    _follow_first(replica, config.poll_s)
    return app_of(store, replica, config), replica


def score_on_cpu() -> None:
    """Lets JAX look for no accelerator, unless JAX_PLATFORMS names one: what a model scores in a few ms is not worth
    the way to a device, and there it would have other last bits.
    """
    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")


def app_of(store: Store, replica: Replica, config: ServerConfig) -> App:
    """The program around a replica that has a version."""
    assert replica.current is not None
    name = config.name or str(replica.current.model.manifest["job"])
    recorder = RequestLog(config.record, share=config.record_share) if config.record is not None else None
    retrieval = None
    if config.recommend is not None or config.items is not None:
        retrieval = Retrieval(store, replica, feature=config.recommend, items=config.items)
    return App(replica, name=name, limits=config.limits, token=config.token, recorder=recorder, retrieval=retrieval)


def _follow_first(replica: Replica, poll_s: float) -> None:
    until_s = SYSTEM_CLOCK.monotonic_s() + START_S
    told = ""
    while True:
        try:
            replica.follow()
            return
        except (NotYet, ShardAway) as error:
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
    answer_promptly()
    Follower(versions, poll_s=config.poll_s)
    return app.asgi()


def _opened(store: Store, config: ServerConfig) -> tuple[Endpoints, HeldVersions[Any], str]:
    """The program, its versions, and what a person is told of the first."""
    score_on_cpu()
    if config.shard is not None:
        held = ShardVersions(store, config.shard)
        held.follow()
        place = config.shard
        # A run of many bags names more ids than a request of a client has bytes.
        limits = replace(config.limits, body_bytes=8 * config.limits.body_bytes)
        return ShardServer(held, limits=limits, token=config.token), held, f"shard {place.index}/{place.count}"
    app, replica = open_app(store, config)
    assert replica.current is not None
    is_same = replica.current.has_same_bits
    return app, replica, "same bits as published" if is_same else "close to what was published, not the same bits"


def serve(store: Store, config: ServerConfig, *, run: str, told: Callable[[str], None] = print) -> None:
    """Answers until SIGTERM or Ctrl-C, then lets running requests end.

    Args:
      run: as other processes open the store.
      told: gets each line for the person who started it.

    Raises:
      ConfigurationError, StorageError, ModelError: as `open_app`, or the port is taken.
    """
    if config.workers > 1:
        serve_with_workers(store, run, config, told=told)
        return
    began_s = SYSTEM_CLOCK.monotonic_s()
    with ending_at_once():
        app, versions, what = _opened(store, config)
    version = versions.current
    assert version is not None
    seconds = SYSTEM_CLOCK.monotonic_s() - began_s
    told(f"{version.name}: step {version.manifest.step:,}, loaded in {seconds:.1f} s, {what}")
    if isinstance(app, App) and app.retrieval is not None:
        told(app.retrieval.words())
    follower = Follower(versions, poll_s=config.poll_s)
    try:
        run_server(app, config, began=lambda _, address: told(f"answers at {address} (Ctrl-C ends it)"))
    finally:
        follower.close()
