"""`forecast`: how a job would train on so many hosts, and what would make it faster. A function of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from podembed.embedding.costs.profile import TableProfile
from podembed.embedding.costs.work import TableWay
from podembed.embedding.lookup.placement import Chosen
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.decisions.table_plan import Plan, PlannedTable
from podembed.orchestrator.prediction.choices import Choice, TableChoice, proposals, setting_choices, table_choices
from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand, traffic_of
from podembed.orchestrator.prediction.memory import HostMemory, host_memory
from podembed.orchestrator.prediction.step import predict
from podembed.orchestrator.prediction.timeline import PredictedStep
from podembed.workers.calibration.record import Calibration
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import feature_bindings, needs_rows

Placed = Callable[[Sequence[Chosen]], Plan]
"""Where tables would lie if costs decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A job on some hosts.

    Attributes:
      step: as it is declared.
      choices: overlap, staleness and the wire's type, with what each alternative would take.
      tables: the way of each table, with what the others would cost.
      others: other numbers of hosts and threads, and other places of the tables, with the step then.
      memory: of the host that holds most.
      is_measured: whether all tables' data was looked at.
    """

    step: PredictedStep
    choices: tuple[Choice, ...]
    tables: tuple[TableChoice, ...]
    others: tuple[tuple[str, PredictedStep], ...]
    memory: HostMemory
    is_measured: bool


def forecast(
    job: JobConfig,
    setting: Setting,
    profiles: Sequence[TableProfile],
    *,
    plan: Callable[[int], Plan],
    calibration: Calibration,
    dense: DenseHalf,
    undo_share: float,
    placed: Placed | None = None,
) -> Forecast:
    """Predicts the declared setting, and those that may be better.

    Args:
      profiles: one a table.
      plan: where tables lie on so many hosts.
      undo_share: of the run's settings.
      placed: where tables would lie on as many hosts as declared, if costs decided; None leaves that out.
    """

    declared = plan(setting.num_hosts)
    here = demands(job, declared, profiles)

    def step(one: Setting) -> PredictedStep:
        tables = here if one.num_hosts == setting.num_hosts else demands(job, plan(one.num_hosts), profiles)
        return predict(tables, one, calibration=calibration, dense=dense)

    memory = host_memory(
        traffic_of(here, setting),
        shard_bytes=max(host.shard_bytes for host in declared.hosts),
        num_hosts=setting.num_hosts,
        undo_share=undo_share,
        num_buffers=2 if setting.overlap is not False or setting.staleness else 1,
    )
    tables = table_choices(here, setting, whys=[table.why for table in declared.tables], calibration=calibration)
    others = [(name, step(one)) for name, one in _other_hosts(setting, most_hosts=job.num_lanes)]
    others.append((f"threads {2 * setting.threads}", step(replace(setting, threads=2 * setting.threads))))
    if placed is not None and setting.num_hosts > 1:
        for name, chosen in proposals(tables).items():
            elsewhere = demands(job, placed(chosen), profiles)
            if [(table.way, table.owner) for table in elsewhere] != [(table.way, table.owner) for table in here]:
                others.append((name, predict(elsewhere, setting, calibration=calibration, dense=dense)))
    return Forecast(
        step=step(setting),
        choices=setting_choices(setting, step),
        tables=tables,
        others=tuple(others),
        memory=memory,
        is_measured=all(profile.is_measured for profile in profiles),
    )


def _other_hosts(setting: Setting, *, most_hosts: int) -> list[tuple[str, Setting]]:
    """Half as many, one more and twice as many, as far as the job has lanes for them."""
    hosts = setting.num_hosts
    return [
        (plural(count, "host"), replace(setting, num_hosts=count))
        for count in dict.fromkeys((hosts // 2, hosts + 1, 2 * hosts))
        if 1 <= count <= most_hosts and count != hosts
    ]


def setting_of(
    job: JobConfig,
    *,
    num_hosts: int,
    hosts_a_machine: int,
    reads_files: bool,
    read_sample_s: float | None = None,
    threads: int = 1,
) -> Setting:
    """As the job declares it."""
    return Setting(
        num_hosts=num_hosts,
        batch_size=job.batch_size,
        hosts_a_machine=hosts_a_machine,
        wire_bytes=2 if job.wire_dtype == "bfloat16" else 4,
        staleness=job.staleness,
        overlap=job.overlap,
        reads_files=reads_files,
        read_sample_s=read_sample_s,
        threads=threads,
    )


def demands(job: JobConfig, plan: Plan, profiles: Sequence[TableProfile]) -> list[TableDemand]:
    """The tables of a job as a plan places them."""
    bindings = feature_bindings(job)
    divided, travels = [0] * len(job.tables), needs_rows(job)
    for feature in bindings:
        divided[feature.table] += feature.combiner != "sum"
    return [
        TableDemand(
            spec=table.spec,
            way=_way(table),
            owner=table.hosts[0] if _way(table) is TableWay.WHOLE else None,
            num_features=table.num_features,
            num_divided=divided[at],
            profile=profile,
            must_travel=travels[at],
            is_on_devices=table.is_on_devices,
        )
        for at, (table, profile) in enumerate(zip(plan.tables, profiles, strict=True))
    ]


def _way(table: PlannedTable) -> TableWay:
    if table.is_on_devices:
        return TableWay.WHOLE
    if not table.is_pooled:
        return TableWay.ROWS
    return TableWay.WHOLE if table.is_whole else TableWay.PARTIAL
