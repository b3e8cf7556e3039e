"""A simulated run on slices: the machines of `machines`, what happens to them by a schedule, and the checks that
nothing is reserved twice and nothing leaks, besides all those of `tests.simulation.simulation`.

A run may do with one slice and takes two. Three are there, most of the time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.decisions import host_watch
from podembed.orchestrator.decisions.host_watch import Cluster
from tests.simulation import schedule as plain
from tests.simulation.backend import SimulatedBackend
from tests.simulation.schedule import Fault, Schedule
from tests.simulation.simulation import DriverLife, Outcome, Simulation, carried_out
from tests.simulation.slices.backend import SliceBackend, SliceCluster
from tests.simulation.slices.machines import OTHER, Machines
from tests.simulation.witness import Violation
from tests.simulation.world import FakeClock, Process

NAMES = "abc"
EVENTS = {
    "lose": "a machine is lost, and its slice with it",
    "lose slice": "all machines of a slice are lost at once",
    "drain": "a machine is announced to go, and goes",
    "return": "the machines that a slice lacks come back",
    "half returns": "one machine that a slice lacks comes back, and the others later",
    "join": "a slice that was never there joins",
    "other kind": "a slice of another topology joins",
    "refuse": "the next reservation is refused",
    "occupied": "another program waits for a slice and has it when it is free, for some seconds",
}
BUSY_S = 14.0
MEND_S = 40.0  # by then all machines are back
LEAST, MOST = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceEvent:
    """What happens to slices.

    Attributes:
      name, worker: of the machine, or of the slice alone.
      seconds: until an announced machine goes, or for which a slice is occupied.
    """

    action: str
    at_s: float
    name: str
    worker: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"at {self.at_s:.2f} s: {self.action} {self.name}{self.worker} {self.seconds:.1f} s"


def draw(seed: int) -> tuple[Schedule, tuple[SliceEvent, ...]]:
    """The schedule of a seed: of processes, and of slices."""
    chance = random.Random(seed)
    kills = [
        Fault(
            action="kill",
            at_s=round(chance.uniform(1.0, BUSY_S), 3),
            target=chance.choice(("driver", "host", "device")),
            which=chance.randrange(4),
        )
        for _ in range(chance.choice((0, 0, 1, 2)))
    ]
    base = plain.draw(seed)
    # In some of them the faults of a plain schedule strike as well: rivals, frozen processes, a storage that fails.
    faults = base.faults if chance.random() < 0.4 else tuple(kills)
    # The numbers of hosts of a plain schedule have no meaning here.
    base = replace(base, faults=faults, keeps_hosts=True, changes_hosts=False)
    return base, tuple(_event(chance) for _ in range(chance.randint(1, 6)))


def _event(chance: random.Random) -> SliceEvent:
    weights = [6, 2, 4, 4, 2, 2, 1, 2, 1]
    return SliceEvent(
        action=chance.choices([*EVENTS], weights)[0],
        at_s=round(chance.uniform(0.5, BUSY_S), 3),
        name=chance.choice(NAMES),
        worker=chance.randrange(2),
        seconds=round(chance.choice((0.5, 6.0, 20.0)) * chance.uniform(0.5, 1.5), 3),
    )


@dataclass(slots=True, eq=False)
class SliceSimulation(Simulation):
    """See the module.

    Attributes:
      events: what happens to slices; `happened` counts those that struck.
    """

    events: tuple[SliceEvent, ...] = ()
    machines: Machines = field(init=False)
    happened: Counter[str] = field(default_factory=Counter)
    _backends: list[SliceBackend] = field(default_factory=list)

    def __post_init__(self) -> None:
        Simulation.__post_init__(self)
        self.machines = Machines(self.world, self.witness.violated)
        for name in "ab":
            self.machines.add(name)
        for event in self.events:
            self.world.at(event.at_s, partial(self._happen, event))
        self.world.at(MEND_S, self._mend)

    def _backend(self, process: Process, clock: FakeClock) -> SimulatedBackend:
        backend = SliceBackend(process, clock, self._around, self.machines)
        self._backends.append(backend)
        return backend

    def _scaling(self, num_hosts: int) -> ScalingConfig:
        return ScalingConfig(
            topology="2x2x2", accelerator_type="TPU-V4", num_slices=(LEAST, MOST), platform="cpu", plan="rule"
        )

    def _cluster(self, backend: SimulatedBackend) -> Cluster | None:
        assert isinstance(backend, SliceBackend)
        return SliceCluster(backend, self.machines, backend.driver, least=LEAST, most=MOST)

    def _happen(self, event: SliceEvent) -> None:
        machines, name = self.machines, event.name
        there = machines.alive(name)
        mine = [machine for machine in there if machine.worker == event.worker]
        has_struck = True
        match event.action:
            case "lose" if mine:
                machines.lose(mine[0])
            case "lose slice" if there:
                for machine in there:
                    machines.lose(machine)
            case "drain" if mine and mine[0].drains_at_s is None:
                machines.drain(mine[0], event.seconds)
            case "return" | "join" if len(there) < 2:
                machines.add(name)
            case "half returns" if not mine:
                machines.add_machine(name, event.worker)
            case "other kind":
                machines.add(f"other-{name}", kind=OTHER)
            case "refuse":
                machines.refusals += 1
            case "occupied" if there:
                machines.taken.add(name)
                self.world.after(event.seconds, partial(machines.taken.discard, name))
            case _:
                has_struck = False
        if has_struck:
            self.happened[event.action] += 1
            self.witness.note(str(event))

    def _mend(self) -> None:
        """Whatever happened, the run can go on from now on."""
        for name in NAMES:
            self.machines.add(name)

    def _check_ending(self, life: DriverLife) -> None:
        Simulation._check_ending(self, life)
        assert isinstance(life.backend, SliceBackend)
        if held := self.machines.held_by(life.process):
            self.witness.violated("I21", f"{life.process} ended and still holds {', '.join(held)}")

    def check_left(self) -> None:
        """I21: what drivers that have ended still hold."""
        for backend in self._backends:
            if held := self.machines.held_by(backend.driver):
                raise Violation("I21", f"{backend.driver} ended and still holds {', '.join(held)}")


@contextmanager
def _looking_often(seconds: float = 0.5) -> Iterator[None]:
    """A simulated run is short, and its driver looks at machines accordingly often."""
    before, host_watch.LOOK_S = host_watch.LOOK_S, seconds
    try:
        yield
    finally:
        host_watch.LOOK_S = before


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOutcome:
    """How a run on slices went. `happened`: events that struck, by action."""

    outcome: Outcome
    happened: Counter[str]
    num_lives: int
    num_refused: int


def simulate(seed: int, *, keeps_log: bool = False) -> SliceOutcome:
    """Carries out the schedule of a seed.

    Raises:
      Violation: an invariant does not hold; or whatever unexpected error a driver ended with.
    """
    schedule, events = draw(seed)
    simulation = SliceSimulation(schedule=schedule, keeps_log=keeps_log, events=events)
    with _looking_often():
        outcome = carried_out(simulation)
    simulation.check_left()
    return SliceOutcome(
        outcome=outcome,
        happened=simulation.happened,
        num_lives=len(simulation.machines.lives),
        num_refused=simulation.machines.num_refused,
    )
