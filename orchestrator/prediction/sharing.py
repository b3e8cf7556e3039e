"""`follow`: the steps of hosts and devices, followed from event to event, where processes share processors.

A host works through the parts of a step in their order. Some parts wait until all hosts have got to a certain part, as
exchanges do. Its device works beside it, from the announcement of a step until all devices have finished theirs. A
thread of the host decodes input meanwhile. On each machine, whoever can work gets an equal share of the processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from podembed.workers.liveness.progress import Phase

_STEPS = 6
_SETTLED = 3
"""The first steps find empty queues; they do not count."""
_MOST_EVENTS = 200_000
_TINY_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Work of a host that is one phase, or a piece of one.

    Attributes:
      cpu_s: processor seconds.
      threads: processors that it uses at once, if there are so many.
      delay_s: that passes before it, without a processor: waking up, and bytes on their way.
      turn_s: that passes besides if its device has something to do, which keeps the processor for so long.
      posts: after it, the other hosts may go on with what awaits this name.
      awaits: before it, all hosts must have posted this name.
    """

    phase: Phase
    cpu_s: float
    threads: float = 1.0
    delay_s: float = 0.0
    turn_s: float = 0.0
    posts: str | None = None
    awaits: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """One host with its device.

    Attributes:
      machine: that it shares with hosts of the same number.
      beside: what it does for the next step while its device works.
      after: what it does when its device has answered. Then the device may begin the next step.
      is_ahead: with staleness, `beside` is all that the device needs for the next step.
      device_cpu_s, device_threads: of a step of the device.
      device_delay_s: of its device, without a processor: waking up, and the sum over all devices.
      device_weight: the device's share of a processor where a host has 1.
      reading_s: processor seconds of the thread that decodes the input of a step.
    """

    machine: int
    beside: tuple[Part, ...]
    after: tuple[Part, ...]
    is_ahead: bool = False
    device_cpu_s: float = 0.0
    device_threads: float = 1.0
    device_delay_s: float = 0.0
    device_weight: float = 1.0
    reading_s: float = 0.0

    @property
    def phase_cpu_s(self) -> dict[Phase, float]:
        """Processor seconds of its working thread in each phase."""
        found: dict[Phase, float] = {}
        for part in (*self.beside, *self.after):
            found[part.phase] = found.get(part.phase, 0.0) + part.cpu_s / max(1.0, part.threads)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A step in the long run.

    Attributes:
      step_s: of a step, the same on all hosts.
      phase_s: by host.
      device_s: by host, from the moment that its device begins until it answers.
    """

    step_s: float
    phase_s: list[dict[Phase, float]]
    device_s: list[float]


@dataclass(slots=True, eq=False)
class _Thread:
    """What is under way. Mutated: `delay_s` and `cpu_s` are what is left, `rate` its share of processors."""

    machine: int
    threads: float = 1.0
    weight: float = 1.0
    delay_s: float = 0.0
    cpu_s: float = 0.0
    rate: float = 0.0

    def begin(self, *, cpu_s: float, delay_s: float, threads: float) -> None:
        self.cpu_s, self.delay_s, self.threads = cpu_s, delay_s, max(1e-3, threads)

    @property
    def is_busy(self) -> bool:
        return self.delay_s > _TINY_S or self.cpu_s > _TINY_S

    @property
    def left_s(self) -> float:
        """Seconds until something changes, at the present rate."""
        if self.delay_s > _TINY_S:
            return self.delay_s
        return self.cpu_s / self.rate if self.rate > 0 else math.inf

    def pass_s(self, seconds: float) -> None:
        if self.delay_s > _TINY_S:
            self.delay_s -= seconds
        else:
            self.cpu_s -= seconds * self.rate


@dataclass(slots=True, eq=False)
class _Host:
    """A host on its way. Mutated: where it is, and what it saw.

    Attributes:
      program: its parts in their order; None is the wait for its device.
      at: of the program, what comes next.
      posts: what it posts as soon as it is done with the part under way.
      announced, answered: steps that its device knows of, and that it has done.
      sums: seconds of each phase, of the steps that count.
      devices_s, ends_s: by step, what the device took, and when the host was done.
    """

    parts: HostParts
    program: list[Part | None]
    thread: _Thread
    device: _Thread
    reader: _Thread
    step: int = 0
    at: int = 0
    posts: str | None = None
    announced: int = 1
    answered: int = 0
    is_device_on: bool = False
    device_began_s: float = 0.0
    phase: Phase = Phase.BETWEEN
    sums: dict[Phase, float] = field(default_factory=dict)
    devices_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    @staticmethod
    def of(parts: HostParts) -> _Host:
        machine = parts.machine
        return _Host(
            parts=parts,
            program=[*parts.beside, None, *parts.after],
            thread=_Thread(machine),
            device=_Thread(machine, weight=parts.device_weight),
            reader=_Thread(machine, cpu_s=parts.reading_s),
        )

    @property
    def is_done(self) -> bool:
        return len(self.ends_s) >= _STEPS


class _Run:
    """Hosts and the clock. Mutated by `go`."""

    def __init__(self, hosts: Sequence[HostParts], cpus: int, processors: dict[int, float]) -> None:
        self.now_s = 0.0
        self._cpus, self._processors = cpus, processors
        self._posted: dict[tuple[str, int], int] = {}
        self.hosts = [_Host.of(host) for host in hosts]
        self._threads = [one for host in self.hosts for one in (host.thread, host.device, host.reader)]

    def go(self) -> Followed:
        for _ in range(_MOST_EVENTS):
            while any(self._advance(host) for host in self.hosts) or self._devices():
                pass
            if all(host.is_done for host in self.hosts):
                return self._found()
            self._pass()
        raise RuntimeError(f"Found no end of {_STEPS} steps after {_MOST_EVENTS:,} events.")

    def _found(self) -> Followed:
        counted = _STEPS - _SETTLED
        step_s = max((host.ends_s[_STEPS - 1] - host.ends_s[_SETTLED - 1]) / counted for host in self.hosts)
        return Followed(
            step_s=step_s,
            phase_s=[{phase: spent / counted for phase, spent in host.sums.items()} for host in self.hosts],
            device_s=[sum(host.devices_s[-counted:]) / counted for host in self.hosts],
        )

    def _advance(self, host: _Host) -> bool:
        """Goes on with a host if it is done with its last part and has what it awaits. Returns whether it did."""
        if host.thread.is_busy or host.is_done:
            return False
        if host.posts is not None:
            key = (host.posts, host.step)
            self._posted[key] = self._posted.get(key, 0) + 1
            host.posts = None
            return True
        if host.at == len(host.program):
            host.step, host.at = host.step + 1, 0
            host.announced = max(host.announced, host.step + 1)
            host.ends_s.append(self.now_s)
            return True
        part = host.program[host.at]
        if part is None:
            if host.parts.is_ahead and host.announced == host.step + 1:
                host.announced += 1
                return True
            host.phase = Phase.DEVICE
            if host.answered <= host.step:
                return False
            host.at += 1
            return True
        host.phase = part.phase
        if part.awaits is not None and self._posted.get((part.awaits, host.step), 0) < len(self.hosts):
            return False
        if part.phase is Phase.READ:
            if host.reader.is_busy:
                return False
            host.reader.begin(cpu_s=host.parts.reading_s, delay_s=0.0, threads=1.0)
        delay_s = part.delay_s + (part.turn_s if host.announced > host.answered else 0.0)
        host.thread.begin(cpu_s=part.cpu_s, delay_s=delay_s, threads=part.threads)
        host.posts = part.posts
        host.at += 1
        return True

    def _devices(self) -> bool:
        """Begins steps of devices that were announced; ends them where all devices have finished theirs."""
        changed = False
        for host in self.hosts:
            if not host.is_device_on and host.announced > host.answered:
                host.is_device_on, host.device_began_s = True, self.now_s
                parts = host.parts
                host.device.begin(cpu_s=parts.device_cpu_s, delay_s=parts.device_delay_s, threads=parts.device_threads)
                changed = True
        number = min(host.answered for host in self.hosts)
        if all(host.answered > number or (host.is_device_on and not host.device.is_busy) for host in self.hosts):
            for host in self.hosts:
                if host.answered == number:
                    host.answered, host.is_device_on = number + 1, False
                    host.devices_s.append(self.now_s - host.device_began_s)
                    changed = True
        return changed

    def _pass(self) -> None:
        """Lets the time pass until something changes."""
        self._share()
        spent_s = min((thread.left_s for thread in self._threads if thread.is_busy), default=math.inf)
        if math.isinf(spent_s):
            raise RuntimeError("Found hosts that wait for each other. Expected that one of them can go on.")
        for host in self.hosts:
            if _SETTLED <= len(host.ends_s) < _STEPS:
                host.sums[host.phase] = host.sums.get(host.phase, 0.0) + spent_s
        for thread in self._threads:
            if thread.is_busy:
                thread.pass_s(spent_s)
        self.now_s += spent_s

    def _share(self) -> None:
        """Who can work on a machine gets processors by weight, and no more than it uses at once."""
        by_machine: dict[int, list[_Thread]] = {}
        for thread in self._threads:
            thread.rate = 0.0
            if thread.is_busy and thread.delay_s <= _TINY_S:
                by_machine.setdefault(thread.machine, []).append(thread)
        for machine, waiting in by_machine.items():
            free = self._processors.get(machine, float(self._cpus))
            while waiting:
                each = free / sum(thread.weight * thread.threads for thread in waiting)
                content = [thread for thread in waiting if thread.weight * each >= 1.0]
                if not content:
                    for thread in waiting:
                        thread.rate = thread.weight * thread.threads * each
                    break
                for thread in content:
                    thread.rate = thread.threads
                    free -= thread.threads
                waiting = [thread for thread in waiting if thread not in content]


def follow(hosts: Sequence[HostParts], *, cpus: int, processors: dict[int, float] | None = None) -> Followed:
    """Steps of these hosts in the long run. A function of its arguments alone.

    Args:
      cpus: processors of a machine.
      processors: by machine, where one has another number for the hosts that are looked at.
    """
    return _Run(hosts, cpus, processors or {}).go()
