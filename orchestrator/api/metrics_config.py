"""`MetricsConfig`: where a run's measurements go."""

from __future__ import annotations

from dataclasses import dataclass

from podembed.orchestrator.api.configuration_error import ConfigurationError
from podembed.workers.declared_types import check_plain_fields

_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where a run's measurements go. None of it changes a number of the run, and none of it can stop it.

    Attributes:
      in_run: write them to `metrics/` in the run's folder, at most 64 MiB. `podembed top`, `health` and `report` read
        them there.
      port: of the driver's machine, where Prometheus scrapes them; 0 takes a free one, None listens nowhere.
    """

    in_run: bool = True
    port: int | None = None

    def __post_init__(self) -> None:
        check_plain_fields(self, ConfigurationError)
        if self.port is not None and not 0 <= self.port <= _LAST_PORT:
            raise ConfigurationError(
                f"Found port={self.port}. Expected a TCP port from 1 to {_LAST_PORT}, 0 for a free one, or None. "
                "Choose a free port."
            )
