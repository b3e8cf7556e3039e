"""`ScalingConfig`: where a run trains. Hosts are counted one by one, or by whole TPU slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.configuration_error import ConfigurationError
from podembed.orchestrator.api.topology import Topology
from podembed.workers.declared_types import check_plain_fields, shown
from podembed.workers.device.options import DeviceOptions, Transfers, device_options, options_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Hosts of a run.

    Attributes:
      num_hosts: hosts that train together: a number, or `(min, max)`, as many of them as the cluster has room for. They
        change while the run goes on, at its commits; below `min` it waits. With `topology` they are those of the
        slices.
      threads_per_host: threads of a host's kernels and of its CPU device. None is one for the kernels and the
        library's own choice for the device. In a cluster of the program's own, hosts keep to
        processors of their own where each gets as many as that.
      resources_per_host: Ray resources reserved for each host, such as `{"CPU": 8, "TPU": 4}`; None takes an even part
        of the cluster's CPUs, at most one. Models run on accelerators that are reserved here, and without any on CPUs.
        A host of a slice has one CPU unless this says otherwise, and all chips of its machine.
      topology: topology of a TPU slice, such as `"4x4"`. The run then trains on whole slices, each host on a machine of
        its own.
      accelerator_type: accelerator type of the slices, as Ray Train has it, such as `"TPU-V6E"`.
      num_slices: slices that train together: a number, or `(min, max)`, as `num_hosts`.
      platform: `"cpu"` runs models on CPUs although accelerators are reserved, as on machines that only pretend to have
        some. None takes the accelerators.
      ask_cluster: asks the cluster's autoscaler for the most hosts or slices while the run lasts.
      in_process: one host inside the driver's own process, without Ray.
      exchange: "auto" or "direct", which are the same; for programs that were written when relays were there too.
      devices_per_host: devices of each host's model. Where it runs on CPUs, so many are made of them. None takes all
        that are there.
      mesh: axes of a host's devices with their sizes, such as `{"data": 2, "model": 2}`, for models that declare how
        their parameters are cut. Hosts follow each other along `data`. None spreads samples over all devices.
      transfers: how arrays travel to devices and back: "packed" in one buffer, "separate", or "auto", which packs them
        for accelerators.
      sparse_cores: lets SparseCores of the chips look sharded tables up, with jax-tpu-embedding
        (`pip install 'podembed[sparsecore]'`). Never run on a TPU so far: see docs/sparsecore.md.
      plan: how tables lie in a run of an older version that recorded plans: "auto" follows them, "rule" places tables
        by sizes and features, as in all other runs.
    """

    num_hosts: int | tuple[int, int] = 1
    threads_per_host: int | None = None
    resources_per_host: Mapping[str, float] | None = None
    topology: str | None = None
    accelerator_type: str | None = None
    num_slices: int | tuple[int, int] = 1
    platform: str | None = None
    ask_cluster: bool = False
    in_process: bool = False
    exchange: str = "auto"
    devices_per_host: int | None = None
    mesh: Mapping[str, int] | None = None
    transfers: str = Transfers.AUTO
    sparse_cores: bool = False
    plan: str = "auto"

    def __post_init__(self) -> None:
        check_plain_fields(self, ConfigurationError)
        for name, example in (("resources_per_host", '{"CPU": 4}'), ("mesh", '{"data": 2}')):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Mapping):
                raise ConfigurationError(
                    f"Found {name}={shown(given)}. Expected a dictionary of names and numbers. Write {name}={example}."
                )
        hosts = _checked_range("num_hosts", self.num_hosts)
        if self.threads_per_host is not None and self.threads_per_host < 1:
            raise ConfigurationError(f"Found threads_per_host={self.threads_per_host}. Expected at least 1, or None.")
        if self.exchange not in ("auto", "direct"):
            raise ConfigurationError(
                f"Found exchange={shown(self.exchange)}. Expected auto: all frames go directly from host to host, and "
                "relays are gone. Leave it out, which changes no number."
            )
        if self.plan not in ("auto", "rule"):
            raise ConfigurationError(f"Found plan={shown(self.plan)}. Expected one of auto, rule.")
        if self.platform not in (None, "cpu"):
            raise ConfigurationError(
                f"Found platform={shown(self.platform)}. Expected 'cpu', or None for the accelerators that hosts "
                "reserve. Reserve others with resources_per_host (--resources)."
            )
        problem = options_problem(self.devices_per_host, self.mesh, self.transfers)
        if problem:
            raise ConfigurationError(problem)
        gpus = (self.resources_per_host or {}).get("GPU", 0.0)
        if 0 < gpus < 1 and hosts[1] > 1:
            raise ConfigurationError(
                f"Found {gpus:g} GPU a host for num_hosts={self.num_hosts}. Expected whole ones, since NCCL sums no "
                "gradients between two processes on one GPU. Reserve GPU=1 for each host, or use one host."
            )
        if self.in_process and hosts[1] != 1:
            raise ConfigurationError(
                f"Found in_process with num_hosts={self.num_hosts}. Expected one host. Leave in_process out to use "
                "several."
            )
        self._check_slices(hosts)

    def _check_slices(self, hosts: tuple[int, int]) -> None:
        _checked_range("num_slices", self.num_slices)
        if self.topology is None:
            given = [f"accelerator_type={shown(self.accelerator_type)}"] if self.accelerator_type is not None else []
            given += [f"num_slices={shown(self.num_slices)}"] if self.num_slices != 1 else []
            if given:
                raise ConfigurationError(
                    f"Found {' and '.join(given)} without a topology. Expected the topology of the TPU slices beside "
                    "the type of their chips and their number. Give it, such as '4x4' (--topology)."
                )
            return
        if self.accelerator_type is None:
            raise ConfigurationError(
                f"Found topology={shown(self.topology)} without an accelerator_type. Expected the generation of the "
                "chips, on which the machines of a slice depend. Give it, such as 'TPU-V6E' (--accelerator-type)."
            )
        topology = Topology.of(self.topology, self.accelerator_type)
        if hosts != (1, 1):
            raise ConfigurationError(
                f"Found num_hosts={shown(self.num_hosts)} beside topology={shown(self.topology)}. Expected one of "
                f"them: a slice of {topology} has {topology.hosts} hosts. Leave num_hosts (--hosts) out, and give "
                "num_slices (--slices)."
            )
        if self.in_process:
            raise ConfigurationError(
                f"Found in_process with topology={shown(self.topology)}. Expected machines of a Ray cluster, which "
                "reserves slices. Leave one of them out."
            )
        others = [name for name in ("TPU", "GPU") if (self.resources_per_host or {}).get(name)]
        if others and (others != ["TPU"] or (self.resources_per_host or {})["TPU"] != topology.chips_per_host):
            raise ConfigurationError(
                f"Found resources_per_host={dict(self.resources_per_host or {})} for hosts of {topology}. Expected "
                f"all {topology.chips_per_host} chips of a machine. Leave TPU and GPU out of it (--resources)."
            )

    @property
    def slices(self) -> Topology | None:
        """The kind of slice that the run trains on; None where hosts are counted."""
        if self.topology is None or self.accelerator_type is None:
            return None
        return Topology.of(self.topology, self.accelerator_type)

    @property
    def slice_fields(self) -> dict[str, Any] | None:
        """The fields that say on what slices, in JSON's types; None where hosts are counted."""
        if self.slices is None:
            return None
        low, high = (self.num_slices, self.num_slices) if isinstance(self.num_slices, int) else self.num_slices
        return {
            "topology": self.topology,
            "accelerator_type": self.accelerator_type,
            "num_slices": [low, high],
            "platform": self.platform,
        }

    @property
    def devices(self) -> DeviceOptions:
        """The devices of each host."""
        chips = {"TPU": self.slices.chips_per_host} if self.slices else {}
        reserved = {} if self.platform == "cpu" else {**(self.resources_per_host or {}), **chips}
        return device_options(
            self.devices_per_host, self.mesh, self.transfers, sparse_cores=self.sparse_cores, resources=reserved
        )

    @property
    def least_hosts(self) -> int:
        """Below this many the run waits."""
        return self._hosts[0]

    @property
    def most_hosts(self) -> int:
        """No more than this many are used."""
        return self._hosts[1]

    @property
    def _hosts(self) -> tuple[int, int]:
        slices = self.slices
        if slices is None:
            return _range(self.num_hosts)
        least, most = _range(self.num_slices)
        return least * slices.hosts, most * slices.hosts

    @property
    def is_range(self) -> bool:
        """Whether the number may change."""
        return self.least_hosts < self.most_hosts

    @property
    def jax_platforms(self) -> str | None:
        """What device processes ask JAX for, the wanted one first; None leaves the choice to their environment."""
        return self.platform or (None if self.topology is None else "tpu,cpu")

    @property
    def reserved(self) -> Mapping[str, float] | None:
        """Ray resources of a host, with the chips of a slice's; None for an even part of the cluster's CPUs."""
        slices = self.slices
        if slices is None:
            return self.resources_per_host
        return {"CPU": 1.0, **(self.resources_per_host or {}), "TPU": float(slices.chips_per_host)}


def _range(number: int | tuple[int, int]) -> tuple[int, int]:
    return (number, number) if isinstance(number, int) else (number[0], number[1])


def _checked_range(name: str, number: int | tuple[int, int]) -> tuple[int, int]:
    """(least, most) of a declared number.

    Raises:
      ConfigurationError: it is neither a number nor a range.
    """
    both = (number,) * 2 if isinstance(number, int) else number
    if not isinstance(both, tuple | list) or not all(type(one) is int for one in both):
        raise ConfigurationError(
            f"Found {name}={shown(number)}. Expected a whole number, or (min, max). Write {name}=2."
        )
    if len(both) != 2 or not 1 <= both[0] <= both[1]:
        raise ConfigurationError(f"Found {name}={number}. Expected at least 1, or (min, max) with 1 <= min <= max.")
    return both[0], both[1]
