"""`ServerConfig`: how a server listens, and what it lets clients ask for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.server.endpoints import Limits
from podembed.serving.server.replica import MOST_SAMPLES
from podembed.serving.server.shares import ShardPlace

POLL_S = 1.0


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
      workers: processes that score over the same memory.
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
    workers: int = 1

    def __post_init__(self) -> None:
        if self.shard is not None and self.shards:
            raise ConfigurationError(
                "Found --shard beside --shards. Expected one of them: a process holds a share of the tables, or scores "
                "with the rows of others. Leave out one."
            )
        if self.workers < 1:
            raise ConfigurationError(f"Found {self.workers} workers. Expected at least 1. Leave out --workers for one.")
        if self.workers > 1 and (self.shard is not None or self.shards):
            raise ConfigurationError(
                f"Found {self.workers} workers beside shards. Expected workers where one machine holds all tables. "
                "Start a process with --shards for each worker."
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

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> ServerConfig:
        """What `dataclasses.asdict` made of a config without a shard, after JSON."""
        return ServerConfig(**{**fields, "limits": Limits(**fields["limits"]), "shards": tuple(fields["shards"])})
