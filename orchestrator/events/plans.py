"""Events of plans: how tables lie, and when that changes."""

from __future__ import annotations

from dataclasses import dataclass

from podembed.orchestrator.events.event import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReason:
    """How a table lies.

    Attributes:
      num_hosts: that have some of it.
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
    """A generation follows a plan for its tables.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanges(Event):
    """At this commit the generation ends, and the next one follows another plan.

    Attributes:
      why: which plan it is.
      step_s, other_s: predicted seconds of the hosts in a step with it, and with the plan before it.
      moved_bytes: that change hosts.
      cost_s: of the change.
      left_steps: that follow, over all epochs.
    """

    step: int
    num_hosts: int
    why: str
    step_s: float
    other_s: float
    moved_bytes: int
    cost_s: float
    left_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlanned(Event):
    """Tables of a new run lie by the rule, although this machine has constants."""

    reason: str
