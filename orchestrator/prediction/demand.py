"""What is to be predicted: the tables of a job as they lie on some hosts, and the setting of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podembed.embedding.costs.profile import TableProfile
from podembed.embedding.costs.work import TableTraffic, TableWay
from podembed.embedding.table_spec import TableSpec
from podembed.workers.processors import are_kept_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a run trains.

    Attributes:
      hosts_a_machine: that share its processors, its memory and, for pooled vectors, shared memory.
      wire_bytes: of a float between machines: 4, or 2 for bfloat16.
      overlap: as `JobConfig.overlap`; None is the faster one of both.
      reads_files: whether a thread of each host decodes input files.
      read_sample_s: of that thread, for a sample; None takes the machine's constants.
      threads: of a host's kernels.
    """

    num_hosts: int
    batch_size: int
    hosts_a_machine: int = 1
    wire_bytes: int = 4
    staleness: int = 0
    overlap: bool | None = True
    reads_files: bool = True
    read_sample_s: float | None = None
    threads: int = 1

    @property
    def share_a_machine(self) -> int:
        """Hosts on one machine, as far as there are so many."""
        return min(self.num_hosts, self.hosts_a_machine)

    def keeps_to_processors(self, cpus: int) -> bool:
        """Whether each host works on a processor of its own, on a machine with so many. Of one machine alone it is
        taken that the program starts the cluster there.
        """
        return self.is_one_machine and are_kept_to(self.share_a_machine, cpus, threads=self.threads)

    @property
    def is_one_machine(self) -> bool:
        return self.num_hosts <= self.hosts_a_machine

    @property
    def host_samples(self) -> float:
        return self.batch_size / self.num_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDemand:
    """One table.

    Attributes:
      way: that its bags take.
      owner: the host that has all of it; None where it is cut.
      num_features: that look up in it.
      num_divided: of these, those whose combiner divides.
      must_travel: its rows go to the samples as they are, whatever else would be faster.
      is_on_devices: devices look up and update it. Hosts keep its rows in memory, and do nothing for it in a step.
    """

    spec: TableSpec
    way: TableWay
    owner: int | None
    num_features: int
    num_divided: int
    profile: TableProfile
    must_travel: bool = False
    is_on_devices: bool = False

    def traffic(self, setting: Setting) -> TableTraffic:
        """What one step asks of it from hosts."""
        samples, profile = setting.host_samples, self.profile
        if self.is_on_devices:
            return TableTraffic(
                dim=self.spec.dim,
                slot_floats=sum(self.spec.widths.values()) - self.spec.dim,
                num_rows=self.spec.num_rows,
                way=TableWay.WHOLE,
                features=0,
                bags=0.0,
                ids=0.0,
                host_rows=0.0,
                all_rows=0.0,
            )
        return TableTraffic(
            dim=self.spec.dim,
            slot_floats=sum(self.spec.widths.values()) - self.spec.dim,
            num_rows=self.spec.num_rows,
            way=self.way,
            features=self.num_features,
            bags=samples * self.num_features,
            ids=samples * sum(profile.ids_per_sample),
            divided_bags=samples * self.num_divided,
            host_rows=profile.rows(samples, num_rows=self.spec.num_rows),
            all_rows=profile.rows(setting.batch_size, num_rows=self.spec.num_rows),
            free_bags=profile.free_bags,
            free_rows=profile.free_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseHalf:
    """The device step of a job.

    Attributes:
      step_s, sample_s: processor seconds for itself, and for each sample.
      gradient_bytes: that devices add up.
      threads: processors that it uses at once, in the mean.
    """

    step_s: float
    sample_s: float
    gradient_bytes: float = 0.0
    threads: float = 1.0

    def seconds(self, samples: float) -> float:
        return self.step_s + self.sample_s * samples


def traffic_of(tables: Sequence[TableDemand], setting: Setting) -> list[TableTraffic]:
    """Of all tables, in their order."""
    return [table.traffic(setting) for table in tables]
