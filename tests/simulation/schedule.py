"""What happens in one simulated run, as a value: its settings and its faults, drawn from a seed, printed, kept and
replayed.

A fault strikes at a time, or when some process is for the n-th time at a point of its work (`after create manifest`,
`host write_save`).
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace

ACTIONS = {
    "kill": "the process that is struck dies",
    "freeze": "it stops, and goes on after some seconds",
    "cut link": "driver and host cannot reach each other for some seconds",
    "cut mesh": "hosts cannot reach each other for some seconds",
    "slow host": "each step of a host takes ten times as long for some seconds",
    "storage down": "every request to the storage fails for some seconds",
    "storage slow": "every request takes a hundred times as long for some seconds",
    "storage full": "every write finds no space for some seconds",
    "stale listing": "listings of data/ still show what was there for some seconds",
    "refused": "one request fails without effect",
    "conflict": "one creation is answered with 409 and has no effect",
    "answer lost": "one request takes effect, but fails for who made it",
    "sent twice": "one creation reaches the storage twice",
    "torn write": "of one data file half is stored, and success reported",
    "lost write": "of one data file nothing is stored, and success reported",
    "wrong read": "one reading of a data file has a wrong bit",
    "stop": "the driver is asked to commit and leave",
    "rival": "a second driver starts, and takes the run over",
    "polite rival": "a second driver starts, and does not take the run over",
    "clock jump": "the driver's wall clock jumps by some seconds",
    "spoil row": "a row of a host that lives on is changed after it went back to a commit",
}
_ONE_SHOT = ("refused", "conflict", "answer lost", "sent twice", "torn write", "lost write", "wrong read")
_WINDOWS = ("storage down", "storage slow", "storage full", "stale listing")
_OPERATIONS = (
    "create claim",
    "create base",
    "create manifest",
    "list lease",
    "list commit",
    "list data",
    "read manifest",
    "write data",
    "read data",
    "delete manifest",
    "delete data",
)
_POINTS = (
    *(f"{when} {operation}" for operation in _OPERATIONS for when in ("before", "after")),
    "host start",
    "host settle",
    "host rejoin",
    "host rejoined",
    "host connect",
    "host restore",
    "host move",
    "host restored",
    "host step",
    "host update",
    "host begin_save",
    "host write_save",
    "device start",
    "device restore",
    "device write_save",
)
# Where a driver that is held up meets another one.
_PROTOCOL = (
    *(f"{when} create {what}" for what in ("claim", "base", "manifest") for when in ("before", "after")),
    *(f"after list {what}" for what in ("lease", "commit", "data")),
    "after read base",
)
# Where hosts that live on pass.
_RECOVERY = (
    "host settle",
    "host rejoin",
    "host rejoined",
    "host connect",
    "host restore",
    "host move",
    "before read data",
    "host restored",
    "device start",
    "device restore",
)
BUSY_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
      action: one of `ACTIONS`.
      at_s: when, unless it strikes at a point.
      point: where; empty for a time.
      nth: how often the point is reached before, this one included.
      target: `driver`, `host` or `device`, for what strikes a process at a time; at a point it is the process that is
        there.
      which: number of the driver, among those that live, and of its host.
      seconds: how long, or how far.
    """

    action: str
    at_s: float = 0.0
    point: str = ""
    nth: int = 1
    target: str = "driver"
    which: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        when = f"at {self.point}, time {self.nth}" if self.point else f"at {self.at_s:.2f} s"
        whom = "" if self.point or self.action in (*_ONE_SHOT, *_WINDOWS) else f" {self.target} {self.which}"
        how_long = f" {self.seconds:.1f} s" if self.seconds else ""
        return f"{when}: {self.action}{whom}{how_long}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One simulated run.

    Attributes:
      noise: seed of latencies and jitter.
      hosts: number of hosts of each driver that is started, in turn.
      buffer_bytes: of the pre-images of each host.
      self_fencing: whether workers leave when they have not heard of their driver for long.
      successor_s: how long a frozen driver is missed before somebody starts another one.
      keeps_hosts: whether hosts live on when others of their generation are lost.
      undo_bytes: of each host's way back to the last commit.
      changes_hosts: whether each generation has another number of hosts, the next of `hosts`, and generations end in
        order for that.
    """

    noise: int
    hosts: tuple[int, ...]
    every_steps: int
    full_every: int
    num_to_keep: int | None
    keep_every_steps: int | None
    read_back: bool
    repeats_requests: bool
    buffer_bytes: int
    self_fencing: bool
    successor_s: float
    faults: tuple[Fault, ...]
    keeps_hosts: bool = False
    undo_bytes: int = 1 << 20
    changes_hosts: bool = False

    @property
    def has_storage_faults(self) -> bool:
        return any(fault.action in (*_ONE_SHOT, *_WINDOWS) for fault in self.faults)

    def without(self, at: int) -> Schedule:
        """The same with one fault less."""
        return replace(self, faults=(*self.faults[:at], *self.faults[at + 1 :]))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Schedule:
        document = json.loads(text)
        faults = tuple(Fault(**fault) for fault in document.pop("faults"))
        hosts = tuple(document.pop("hosts"))
        return Schedule(hosts=hosts, faults=faults, **document)

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in asdict(self).items() if key != "faults")
        return "\n".join([settings, *(f"  {fault}" for fault in self.faults)])


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    chance = random.Random(seed)
    return Schedule(
        noise=chance.randrange(1 << 30),
        hosts=tuple(chance.choices((1, 2, 3, 4), (1, 4, 3, 1), k=6)),
        every_steps=chance.choice((2, 3, 4)),
        full_every=chance.choice((1, 3, 3)),
        num_to_keep=chance.choice((2, 2, 3, None)),
        keep_every_steps=chance.choice((None, None, 6)),
        read_back=chance.random() < 0.25,
        repeats_requests=chance.random() < 0.5,
        buffer_bytes=chance.choice((200, 1 << 12)),
        self_fencing=chance.random() < 0.7,
        successor_s=chance.uniform(1.0, 40.0),
        faults=(
            *(_duel(chance) if chance.random() < 0.35 else ()),
            *(_loss(chance) if chance.random() < 0.65 else ()),
            *(_full_storage(chance) if chance.random() < 0.2 else ()),
            *_faults(chance),
        ),
        keeps_hosts=chance.random() < 0.75,
        undo_bytes=chance.choice((0, 400, 1500, 1 << 20, 1 << 20)),
        changes_hosts=chance.random() < 0.4,
    )


def _faults(chance: random.Random) -> list[Fault]:
    return [_fault(chance) for _ in range(chance.choices((0, 1, 2, 3, 4, 5, 6), (1, 4, 5, 5, 4, 3, 2))[0])]


def _duel(chance: random.Random) -> tuple[Fault, ...]:
    """Two drivers at once, and one of them held up where the protocol is thinnest, or in trouble just then."""
    rival = Fault(action="rival", at_s=round(chance.uniform(1.0, 9.0), 3))
    if chance.random() < 0.4:
        at_s = round(rival.at_s + chance.uniform(0.0, 1.5), 3)
        return (rival, Fault(action="kill", at_s=at_s, target=chance.choice(("host", "device"))))
    point = chance.choice(_PROTOCOL)
    often = 12 if "lease" in point else 4
    held_up = Fault(action="freeze", point=point, nth=chance.randint(1, often), seconds=_seconds("freeze", chance))
    return (rival, held_up)


def _loss(chance: random.Random) -> tuple[Fault, ...]:
    """A process is lost while the run works, perhaps during a save, and often another one while hosts that lived on
    begin again.
    """
    at_s = round(chance.uniform(4.0, 11.0), 3)
    first = Fault(action="kill", at_s=at_s, target=chance.choice(("host", "host", "device")), which=chance.randrange(4))
    if chance.random() < 0.4:
        point = chance.choice(("host begin_save", "host write_save", "after write data", "after create manifest"))
        first = replace(first, at_s=0.0, point=point, nth=chance.randint(1, 40 if "data" in point else 6))
    after = chance.random()
    if after < 0.3:
        return (first,)
    if after < 0.45:
        return (first, Fault(action="spoil row", at_s=round(at_s - 1.0, 3), target="host", which=chance.randrange(4)))
    point = chance.choice(_RECOVERY)
    action = chance.choice(("kill", "kill", "freeze"))
    second = Fault(
        action=action,
        point=point,
        nth=chance.randint(1, 6),
        seconds=_seconds(action, chance) if action == "freeze" else 0.0,
    )
    return (first, second)


def _full_storage(chance: random.Random) -> tuple[Fault, ...]:
    """Saves fail, perhaps several in a row, and then a host is lost: those that live on go back beyond all of them."""
    at_s = round(chance.uniform(4.0, 7.0), 3)
    lost_s = round(at_s + chance.uniform(0.5, 5.0), 3)
    return (
        Fault(action="storage full", at_s=at_s, seconds=round(chance.uniform(0.5, 6.0), 3)),
        Fault(action="kill", at_s=lost_s, target="host", which=chance.randrange(4)),
    )


def _fault(chance: random.Random) -> Fault:
    action = chance.choices(
        [*ACTIONS],
        [8 if name == "kill" else 4 if name in ("freeze", "rival") else 1 for name in ACTIONS],
    )[0]
    fault = Fault(
        action=action,
        at_s=round(chance.uniform(0.0, BUSY_S), 3),
        target=chance.choices(("driver", "host", "device"), (2, 3, 1))[0],
        which=chance.randrange(4),
        seconds=_seconds(action, chance),
    )
    if action in ("clock jump", "slow host", "spoil row") or chance.random() < 0.45:
        return fault
    point = chance.choice(_POINTS)
    often = 40 if "data" in point or "update" in point else 12 if "lease" in point or "step" in point else 5
    return replace(fault, point=point, nth=chance.randint(1, often), at_s=0.0)


def _seconds(action: str, chance: random.Random) -> float:
    if action == "freeze":
        return round(chance.choice((0.3, 3.0, 15.0, 60.0)) * chance.uniform(0.5, 1.5), 3)
    if action in ("cut link", "cut mesh", "slow host", *_WINDOWS):
        return round(chance.choice((1.0, 8.0, 45.0)) * chance.uniform(0.5, 1.5), 3)
    if action == "clock jump":
        return round(chance.uniform(-7200.0, 7200.0), 3)
    return 0.0
