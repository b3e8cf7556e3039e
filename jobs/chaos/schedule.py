"""What `podembed chaos` does to a run: schedules of faults, each with what must come of it. Values and pure functions.

The curated list (`selection.curated`) goes through the faults of docs/faults.md by their numbers. Random schedules
(`selection.drawn`) are drawn from what a run must survive without a trace. A schedule fits a run of so many hosts and
steps with commits at regular steps. So its faults meet the places that they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from podembed.orchestrator.decisions.failure import FaultClass
from podembed.orchestrator.events.run import DriverEnded, GenerationLost
from podembed.workers.faults.plan import Fault

DONE = frozenset({0})
# Phases of a step that every host passes in every step, by the name that the list of faults gives them.
PHASES: Mapping[str, tuple[str, ...]] = {
    "P0 read": ("step.read",),
    "P2 dedup": ("step.dedup",),
    "P3 id exchange": ("step.id_exchange",),
    "P4 gather": ("step.gather",),
    "P5 exchange of vectors": ("step.activation_exchange",),
    "P6 to device": ("step.device",),
    "P8 gradient exchange": ("step.gradient_exchange",),
    "P9 apply": ("step.update", "step.update.between", "step.update.mid"),
    "P10 done": ("step.done", "step.end_of_window"),
}
DEVICE_POINTS = ("device.step", "device.gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The run that faults are planned for: `num_hosts` hosts, `num_steps` steps, a commit every `commit_every`."""

    num_hosts: int = 2
    num_steps: int = 60
    commit_every: int = 10

    def step_after(self, commits: int, offset: int = 3) -> int:
        """A step that many commits are behind of, in the middle of an interval."""
        return min(commits * self.commit_every + offset, self.num_steps - 2)


@dataclass(frozen=True, slots=True)
class Told:
    """An event that a driver must have logged: its kind and some of its values. A set stands for one of its members."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        return self.kind + "".join(f" {name}={_shown(value)}" for name, value in self.values.items())

    def is_met(self, kind: str, values: Mapping[str, Any]) -> bool:
        """Whether an event of this kind, with these values, is one."""
        return kind == self.kind and all(
            values.get(name) in (wanted if isinstance(wanted, frozenset) else {wanted})
            for name, wanted in self.values.items()
        )


def _shown(value: Any) -> str:
    return " or ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Faults of one round, and what must come of them.

    Attributes:
      number: in docs/faults.md, such as `F6`; `random` for drawn ones.
      label: its own name: `F6.3` is the third of F6; `seed 17` for a drawn one.
      title: what happens, one line.
      exit_codes: how the supervised run may end; 0 is the end of all steps.
      tells: events, each of which must be in the log of the run's drivers.
      flags: further flags of `train`.
      settings: arguments of the job that differ from the undisturbed run, which is then no measure for bytes.
      compares: `bytes` with the undisturbed run, or `samples` alone, where another number of hosts sums in another
        order.
      hosts_after: a planned change: the run goes on with so many hosts after it was stopped.
      rival: a second driver that comes when the first fault strikes: one that asks, or one that takes over.
      damages: the fault spoils what is committed, without anybody noticing; `fsck` must find it.
      detect_s, recover_s: longest times for this schedule; None takes those of the campaign, infinity sets none.
    """

    number: str
    title: str
    faults: tuple[Fault, ...]
    exit_codes: frozenset[int] = DONE
    tells: tuple[Told, ...] = ()
    flags: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    compares: Literal["bytes", "samples"] = "bytes"
    hosts_after: int | None = None
    rival: Literal["asks", "takes_over"] | None = None
    detect_s: float | None = None
    recover_s: float | None = None
    damages: bool = False
    label: str = ""

    @property
    def needs_hosts(self) -> bool:
        """Whether it means nothing for one host in the driver's own process: a driver that survives its workers, other
        hosts, frames.
        """
        points = {fault.point for fault in self.faults}
        return self.hosts_after is not None or bool(
            points & {"driver.fault", "driver.recovered", "mesh.send", "step.undo"}
        )

    @property
    def is_finished(self) -> bool:
        """Whether the run must train all its steps."""
        return self.exit_codes == DONE


def kill(point: str, rank: str | None = None, **more: Any) -> Fault:
    """The end of a process at a point; `more` as in `Fault`."""
    return Fault(point=point, action="kill", rank=rank, **more)


def ended_with(*errors: type[Exception]) -> Told:
    """A driver ended with an exception of one of these very types."""
    return Told(DriverEnded.kind, {"error": frozenset(error.__name__ for error in errors)})


def lost_to(fault: FaultClass) -> Told:
    """A generation was lost to a fault of this class."""
    return Told(GenerationLost.kind, {"fault": fault.name.lower()})
