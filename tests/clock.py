"""A clock for code that takes one as an argument (`orchestrator.clock.Clock`)."""

from __future__ import annotations


class FakeClock:
    """Sleeping takes no time. `now_s`: what both of its times say."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
