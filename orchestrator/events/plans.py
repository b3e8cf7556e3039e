"""Events of recorded plans: how tables lie."""

from __future__ import annotations

from dataclasses import dataclass

from podembed.orchestrator.api.text import plural
from podembed.orchestrator.events.event import MOST_TABLES, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReason:
    """How a table lies.

    Attributes:
      num_hosts: number of hosts that have some of it.
      is_pooled: its owners pool the bags of its features; otherwise rows travel.
      why: in words.
      is_on_devices: each device holds all of it, and hosts keep what was committed.
    """

    table: str
    num_hosts: int
    is_pooled: bool
    why: str
    is_on_devices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesPlanned(Event):
    """A generation follows a recorded plan for its tables.

    Attributes:
      step: from which on.
      why: which plan it is.
      step_s, other_s: predicted seconds of the hosts in a step with it, and with the plan before it, or the rule.
      tables: in the job's order.
    """

    step: int
    num_hosts: int
    why: str
    step_s: float
    other_s: float
    tables: tuple[TableReason, ...]

    def sentence(self) -> str:
        named = [
            f"{table.table} on {'the devices' if table.is_on_devices else plural(table.num_hosts, 'host')}: {table.why}"
            for table in self.tables
        ]
        more = f"; and {plural(len(named) - MOST_TABLES, 'more table')}" if len(named) > MOST_TABLES else ""
        return (
            f"plan of the tables from step {self.step} on: {self.why}; the hosts take {1e3 * self.step_s:.2f} ms a "
            f"step as predicted, {1e3 * self.other_s:.2f} without it; {'; '.join(named[:MOST_TABLES])}{more}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlanned(Event):
    """The run has recorded plans, but none for these hosts, so tables lie by the rule."""

    template = "tables lie by size and features: {reason}"
    reason: str
