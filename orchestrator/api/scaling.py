"""`ScalingConfig`: where a run trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podembed.orchestrator.api.configuration_error import ConfigurationError
from podembed.workers.declared_types import check_plain_fields, shown
from podembed.workers.mesh.options import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Hosts of a run.

    Attributes:
      num_hosts: hosts that train together: a number, or `(min, max)`, as many of them as the cluster has room for. They
        change while the run goes on, at its commits; below `min` it waits.
      threads_per_host: threads of a host's kernels and of its CPU device. None is one for the kernels and the
        library's own choice for the device.
      resources_per_host: Ray resources reserved for each host, such as `{"CPU": 8, "TPU": 4}`; None takes an even part
        of the cluster's CPUs, at most one. Models run on accelerators that are reserved here, and without any on CPUs.
      in_process: one host inside the driver's own process, without Ray.
      exchange: how hosts exchange ids, rows and gradients: "direct", "two-hop" by way of relays, or "auto", which
        chooses after a few steps of each generation. Changes no number.
      plan: how tables lie on the hosts: "rule", by their sizes and features, or "auto". That is the predicted best,
        for runs that began on a machine with constants (`podembed calibrate`), and the rule for others.
    """

    num_hosts: int | tuple[int, int] = 1
    threads_per_host: int | None = None
    resources_per_host: Mapping[str, float] | None = None
    in_process: bool = False
    exchange: str = Route.AUTO
    plan: str = "auto"

    def __post_init__(self) -> None:
        check_plain_fields(self, ConfigurationError)
        hosts = (self.num_hosts,) * 2 if isinstance(self.num_hosts, int) else self.num_hosts
        if not isinstance(hosts, tuple | list) or not all(type(number) is int for number in hosts):
            raise ConfigurationError(
                f"Found num_hosts={shown(self.num_hosts)}. Expected a whole number, or (min, max). Write num_hosts=2."
            )
        if len(hosts) != 2 or not 1 <= hosts[0] <= hosts[1]:
            raise ConfigurationError(
                f"Found num_hosts={self.num_hosts}. Expected at least 1, or (min, max) with 1 <= min <= max."
            )
        if self.threads_per_host is not None and self.threads_per_host < 1:
            raise ConfigurationError(f"Found threads_per_host={self.threads_per_host}. Expected at least 1, or None.")
        if self.exchange not in tuple(Route):
            raise ConfigurationError(f"Found exchange={shown(self.exchange)}. Expected one of {', '.join(Route)}.")
        if self.plan not in ("auto", "rule"):
            raise ConfigurationError(f"Found plan={shown(self.plan)}. Expected one of auto, rule.")
        gpus = (self.resources_per_host or {}).get("GPU", 0.0)
        if 0 < gpus < 1 and hosts[1] > 1:
            raise ConfigurationError(
                f"Found {gpus:g} GPU a host for num_hosts={self.num_hosts}. Expected whole ones, since NCCL sums no "
                "gradients between two processes "
                f"on one GPU. Reserve GPU=1 for each host, or use one host."
            )
        if self.in_process and hosts[1] != 1:
            raise ConfigurationError(
                f"Found in_process with num_hosts={self.num_hosts}. Expected one host. Leave in_process out to use "
                "several."
            )

    @property
    def least_hosts(self) -> int:
        """Below this many the run waits."""
        return self.num_hosts if isinstance(self.num_hosts, int) else self.num_hosts[0]

    @property
    def most_hosts(self) -> int:
        """No more than this many are used."""
        return self.num_hosts if isinstance(self.num_hosts, int) else self.num_hosts[1]

    @property
    def is_range(self) -> bool:
        """Whether the number may change."""
        return self.least_hosts < self.most_hosts
