"""A clock for code that takes one as an argument (`orchestrator.api.clock.Clock`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FakeClock:
    """Sleeping takes no time. `now_s`: what both of its times say."""

    now_s: float = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
