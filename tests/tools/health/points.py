"""Points as a driver's measurer makes them, of chosen windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan, AlarmEnded
from podembed.tools.health.watch import HealthWatch
from podembed.tools.metrics.measurer import Measurer
from podembed.tools.metrics.point import Point
from podembed.workers.liveness.process_statistics import ProcessUsage
from podembed.workers.liveness.progress import Phase
from tests.clock import FakeClock
from tests.tools.metrics.windows import window

USUAL: Mapping[Phase, float] = {Phase.READ: 0.02, Phase.DEVICE: 0.4, Phase.ID_EXCHANGE: 0.1, Phase.POOL: 0.4}


class Driver:
    """Lets windows follow each other, with their times. Mutated: the clock, the step and what was said."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.measurer = Measurer(monotonic_s=self.clock.monotonic_s, wall_s=self.clock.wall_s)
        self.watch = HealthWatch()
        self.points: list[Point] = []
        self.said: list[Event] = []
        self.step = 0

    def event(self, event: Event) -> None:
        point = self.measurer.point(event)
        if point is not None:
            self.points.append(point)
            self.said += self.watch.take(point)

    def windows(
        self,
        count: int,
        *,
        seconds: float = 2.0,
        steps: int = 10,
        loss: float | None = None,
        shares: Sequence[Mapping[Phase, float]] = (USUAL, USUAL),
        memory_bytes: int = 1 << 30,
        **options: Any,
    ) -> None:
        """So many windows more, whose hosts spend these shares of them in phases."""
        for _ in range(count):
            self.clock.now_s += seconds
            falling = 0.4 + 0.3 * math.exp(-self.step / 100) if loss is None else loss
            made = window(self.step, self.step + steps, seconds=seconds, loss=falling, num_hosts=len(shares), **options)
            usage = ProcessUsage(
                process=7,
                cpu_s=1.0,
                memory_bytes=memory_bytes,
                peak_memory_bytes=memory_bytes,
                num_files=9,
                num_sockets=4,
            )
            hosts = [
                replace(host, phase_s={phase: part * seconds for phase, part in spent.items()}, usage=(usage,))
                for host, spent in zip(made.hosts, shares, strict=True)
            ]
            self.step += steps
            self.event(replace(made, hosts=tuple(hosts)))

    @property
    def begun(self) -> list[tuple[str, str]]:
        return [(one.alarm, one.subject) for one in self.said if isinstance(one, AlarmBegan)]

    @property
    def ended(self) -> list[tuple[str, str]]:
        return [(one.alarm, one.subject) for one in self.said if isinstance(one, AlarmEnded)]

    @property
    def standing(self) -> list[tuple[str, str]]:
        return [*self.watch.standing]
