"""What a plan chooses, and what each alternative would take: overlap, staleness, the wire's type, and the way of every
table. And other ways in which all tables could lie (`proposals`). Functions of their arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from podembed.embedding.costs.constants import Kernels
from podembed.embedding.costs.work import TableTraffic, TableWay, Touched, table_work
from podembed.embedding.lookup.placement import Chosen
from podembed.embedding.lookup.pooling_choice import why_not_pooled
from podembed.orchestrator.prediction.demand import Setting, TableDemand, traffic_of
from podembed.orchestrator.prediction.parts import sent_bytes
from podembed.orchestrator.prediction.timeline import PredictedStep
from podembed.workers.calibration.record import Calibration

Step = Callable[[Setting], PredictedStep]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One part of a setting.

    Attributes:
      name: of the part, as `JobConfig` has it.
      chosen: one of `steps`.
      steps: the step with each alternative.
      why: it is chosen.
    """

    name: str
    chosen: str
    steps: tuple[tuple[str, PredictedStep], ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WayCost:
    """What a table costs on one of its ways, in one step.

    Attributes:
      host_s: seconds of a host in the mean, messages included.
      owner_s: seconds of the host that owns it whole; None on the other ways.
      sent_bytes: by a host in the mean.
    """

    host_s: float
    owner_s: float | None
    sent_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChoice:
    """The way of a table.

    Attributes:
      why: it goes this way.
      costs: of each way that its optimizer and its features allow.
      is_on_devices: hosts do nothing for it in a step.
    """

    name: str
    way: TableWay
    why: str
    costs: tuple[tuple[TableWay, WayCost], ...]
    is_on_devices: bool = False

    @property
    def cost(self) -> WayCost:
        """Of the way that it goes."""
        return dict(self.costs)[self.way]

    @property
    def cheapest(self) -> TableWay:
        """The way that takes least of all hosts together; that of the table where another one is no better."""
        way, cost = min(self.costs, key=lambda item: item[1].host_s)
        return way if cost.host_s < self.cost.host_s else self.way


def setting_choices(setting: Setting, step: Step) -> tuple[Choice, ...]:
    """Overlap, staleness and the wire's type: what is declared, or what is faster where nothing is."""
    found = [_overlap(setting, step), _staleness(setting, step)]
    if setting.num_hosts > 1:
        found.append(_wire(setting, step))
    return tuple(found)


def _overlap(setting: Setting, step: Step) -> Choice:
    steps = tuple((name, step(replace(setting, overlap=value))) for name, value in (("off", False), ("on", True)))
    off, on = (found.step_s for _, found in steps)
    if setting.staleness:
        return Choice(name="overlap", chosen="on", steps=steps, why="with staleness a lookup waits for no update")
    if setting.overlap is not None:
        return Choice(name="overlap", chosen="on" if setting.overlap else "off", steps=steps, why="declared")
    chosen, other = ("on", off - on) if on <= off else ("off", on - off)
    return Choice(name="overlap", chosen=chosen, steps=steps, why=f"auto: {1e3 * other:.2f} ms a step less")


def _staleness(setting: Setting, step: Step) -> Choice:
    steps = tuple((str(value), step(replace(setting, staleness=value))) for value in (0, 1))
    why = "declared; 1 changes what lookups see"
    return Choice(name="staleness", chosen=str(setting.staleness), steps=steps, why=why)


def _wire(setting: Setting, step: Step) -> Choice:
    widths = (("float32", 4), ("bfloat16", 2))
    steps = tuple((name, step(replace(setting, wire_bytes=width))) for name, width in widths)
    chosen = next(name for name, width in widths if width == setting.wire_bytes)
    return Choice(name="wire_dtype", chosen=chosen, steps=steps, why="declared; bfloat16 rounds to 8 bits")


def table_choices(
    tables: Sequence[TableDemand], setting: Setting, *, whys: Sequence[str], calibration: Calibration
) -> tuple[TableChoice, ...]:
    """Per table its way, and what each way costs. The rest of the plan stays as it is.

    Args:
      whys: one a table, why it goes its way.
    """
    kernels = calibration.kernels_for(setting.share_a_machine)
    traffic = traffic_of(tables, setting)
    touched = Touched.of(traffic, setting.num_hosts)
    return tuple(
        TableChoice(
            name=table.spec.name,
            way=table.way,
            why=why,
            costs=tuple(
                (way, _cost(replace(asked, way=way), setting, touched, kernels, calibration))
                for way in _ways(table, setting)
            ),
            is_on_devices=table.is_on_devices,
        )
        for table, asked, why in zip(tables, traffic, whys, strict=True)
    )


def _ways(table: TableDemand, setting: Setting) -> list[TableWay]:
    if setting.num_hosts == 1 or table.is_on_devices or table.must_travel or why_not_pooled(table.spec) is not None:
        return [table.way]
    return [*TableWay]


def _cost(
    asked: TableTraffic, setting: Setting, touched: Touched, kernels: Kernels, calibration: Calibration
) -> WayCost:
    hosts = setting.num_hosts
    work = table_work(asked, num_hosts=hosts, touched=touched, caches=kernels.caches)
    every, owner = (
        sum(kernels.seconds(key, counts) for key, counts in part.counts.items())
        for part in (work.every_host, work.owner)
    )
    sent = sent_bytes([asked], setting)
    wire_s = sent * calibration.wire.byte_s
    return WayCost(
        host_s=every + owner / hosts + wire_s,
        owner_s=every + owner + wire_s if asked.way is TableWay.WHOLE else None,
        sent_bytes=sent,
    )


def proposals(tables: Sequence[TableChoice]) -> Mapping[str, tuple[Chosen, ...]]:
    """By name, one choice a table each. What memory and optimizers do not allow is left to the placement.

    The first one keeps the ways of all tables and shares their work evenly, where a driver counts features.
    """
    ways = {
        "tables shared by predicted work": [table.way for table in tables],
        "each table its cheapest way": [table.cheapest for table in tables],
        "all tables cut": [_cut(table) for table in tables],
    }
    return {name: _chosen(tables, found) for name, found in ways.items()}


def _cut(table: TableChoice) -> TableWay:
    """The cheaper way of a table that is cut; its own where there is none."""
    costs = {way: cost.host_s for way, cost in table.costs if way is not TableWay.WHOLE}
    return min(costs, key=lambda way: costs[way], default=table.way)


def _chosen(tables: Sequence[TableChoice], ways: Sequence[TableWay]) -> tuple[Chosen, ...]:
    seconds = [dict(table.costs)[way].host_s for table, way in zip(tables, ways, strict=True)]
    total_s = sum(seconds)
    return tuple(
        Chosen(
            is_whole=way is TableWay.WHOLE,
            pools=way is TableWay.PARTIAL,
            work=spent / total_s if total_s else 0.0,
            reason=_reason(table, way),
        )
        for table, way, spent in zip(tables, ways, seconds, strict=True)
    )


def _reason(table: TableChoice, way: TableWay) -> str:
    """The predicted cost of the way, and of the others."""
    costs = {one: f"{one} {1e3 * cost.host_s:.3f}" for one, cost in table.costs}
    return ", ".join([f"predicted ms: {costs.pop(way)}", *costs.values()])
