"""A world on a fake clock: events in order of time, processes that can be killed and frozen, and code that blocks and
takes turns.

Threads: straight-line code (a driver, a publication, a worker's method) runs in a thread of its own, here called a
fiber, because the code under test blocks in the middle of calls. But exactly one thread runs at any time, the one that
has the baton: a fiber that blocks goes through the events until it is another fiber's turn, gives that one the baton
and waits for its own. So nothing is concurrent, nothing here needs a lock, and one seed gives one history. Threads are
kept and used again by later fibers; they end with the program.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

STARTED_WALL_S = 1_700_000_000.0
# Not 0, which code might take for "never".
STARTED_MONOTONIC_S = 1_000.0


class Killed(BaseException):
    """The process that the code belongs to is gone. Raised by every touch of the world, so that what the code still
    does has no effect.
    """


class EndlessSimulation(AssertionError):
    """Events go on and on."""


class Process:
    """Something that is killed or frozen as a whole. Mutated by the world.

    Attributes:
      role: `driver`, `host` or `device`.
      generation: that it works for; 0 while it has none.
    """

    def __init__(self, world: World, role: str, name: str) -> None:
        self.role = role
        self.name = name
        self.generation = 0
        self.is_alive = True
        self.thaws_s = 0.0
        self._world = world
        self._fibers: list[Fiber] = []
        self._held: list[Callable[[], Any]] = []
        self._at_death: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def is_frozen(self) -> bool:
        return self.is_alive and self._world.now_s < self.thaws_s

    def at_death(self, action: Callable[[], None]) -> None:
        self._at_death.append(action)

    def when_thawed(self, action: Callable[[], Any]) -> None:
        """Does the action now, or when the process is no longer frozen; never if it dies before."""
        if self.is_frozen:
            self._held.append(action)
        elif self.is_alive:
            action()

    def kill(self) -> None:
        """As SIGKILL does: no code of the process has any effect from now on."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._held.clear()
        for fiber in self._fibers:
            fiber.wake()
        for action in self._at_death:
            action()

    def freeze(self, seconds: float) -> None:
        """As SIGSTOP does, until SIGCONT."""
        self.thaws_s = max(self.thaws_s, self._world.now_s + seconds)
        self._world.at(self.thaws_s, self._thaw)

    def _thaw(self) -> None:
        if self.is_alive and not self.is_frozen:
            held, self._held = self._held, []
            for action in held:
                # As events, so that what they wake takes its turn as always.
                self._world.at(self._world.now_s, action)


class Fiber:
    """Blocking code of one process. Starts with its first turn."""

    def __init__(self, world: World, process: Process, work: Callable[[], None]) -> None:
        self.process = process
        self.is_over = False
        self._world = world
        self._work = work
        self._ticket = 0
        self._runner = _Runner.free()
        self._runner.fiber = self
        process._fibers.append(self)
        self.wake()

    @property
    def baton(self) -> Any:
        return self._runner.baton

    def wake(self) -> None:
        """Its turn comes now, if it still waits for it then."""
        self._world.at(self._world.now_s, partial(self._turn, self._ticket))

    def block(self, timeout_s: float | None = None) -> None:
        """Lets others run until `wake`, or until the time has passed."""
        self._ticket += 1
        if timeout_s is not None:
            self._world.at(self._world.now_s + timeout_s, partial(self._turn, self._ticket))
        self._world.take_turns(self.baton)
        if not self.process.is_alive:
            raise Killed

    def run(self) -> None:
        """All of it, in its own thread."""
        try:
            if self.process.is_alive:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self._world.fail(error)
        finally:
            self.is_over = True
            self.process._fibers.remove(self)

    def _turn(self, ticket: int) -> Fiber | None:
        if ticket != self._ticket or self.is_over:
            return None
        if self.process.is_frozen:
            self.process.when_thawed(partial(self._turn, ticket))
            return None
        return self


class _Runner:
    """A thread that runs one fiber after another."""

    idle: ClassVar[list[_Runner]] = []

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.fiber: Fiber | None = None
        threading.Thread(target=self._run, daemon=True, name="simulated").start()

    @staticmethod
    def free() -> _Runner:
        return _Runner.idle.pop() if _Runner.idle else _Runner()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            fiber, self.fiber = self.fiber, None
            if fiber is None:
                raise RuntimeError("A thread got the baton without a fiber.")
            fiber.run()
            _Runner.idle.append(self)
            fiber._world.take_turns(None)


class World:
    """The events, the time, and whose turn it is.

    Args:
      longest_s: of simulated time, after which the run counts as endless.
    """

    def __init__(self, *, longest_s: float) -> None:
        self.now_s = 0.0
        self.current: Fiber | None = None
        self.num_events = 0
        self._longest_s = longest_s
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = 0
        self._main = threading.Lock()
        self._main.acquire()
        self._error: BaseException | None = None
        self._is_ending = False
        self.processes: list[Process] = []

    def process(self, role: str, name: str) -> Process:
        process = Process(self, role, name)
        self.processes.append(process)
        return process

    def at(self, at_s: float, action: Callable[[], Any]) -> None:
        """Does the action at a time. It must not block; a fiber that it returns has the next turn."""
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, action))

    def after(self, delay_s: float, action: Callable[[], Any]) -> None:
        self.at(self.now_s + delay_s, action)

    def fiber(self, process: Process, work: Callable[[], None]) -> Fiber:
        return Fiber(self, process, work)

    def touch(self) -> None:
        """Raises `Killed` if the code that runs belongs to a dead process."""
        if self.current is not None and not self.current.process.is_alive:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Blocks the fiber that runs."""
        self.touch()
        if self.current is not None:
            self.current.block(seconds)

    def fail(self, error: BaseException) -> None:
        """Ends the simulation; `run` raises the first such error."""
        if not self._is_ending:
            self._error = self._error or error

    def run(self) -> None:
        """Goes on until nothing is left to happen. Every fiber has ended then.

        Raises:
          EndlessSimulation: it would not end; or whatever `fail` was told, or an action raised.
        """
        try:
            self.take_turns(self._main)
        finally:
            self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        """Unwinds every fiber that is still blocked."""
        error, self._error, self._is_ending = self._error, None, True
        self._events.clear()
        for process in self.processes:
            process._at_death.clear()
            process.kill()
            for fiber in process._fibers:
                fiber.wake()
        self.take_turns(self._main)
        self._error = error

    def take_turns(self, mine: Any) -> None:
        """Goes through the events until the turn of the one with this baton, or, where another's comes first, waits for
        it.

        Args:
          mine: None at the end of a fiber, which has no turn any more.
        """
        fiber: Fiber | None = None
        while fiber is None and self._events and self._error is None:
            at_s, _, action = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            self.num_events += 1
            self.current = None
            try:
                if self.now_s > self._longest_s and not self._is_ending:
                    raise EndlessSimulation(f"still going on after {self.now_s:.0f} s")
                fiber = action()
            except BaseException as error:
                self.fail(error)
                fiber = None
        self.current = fiber
        baton = self._main if fiber is None else fiber.baton
        if baton is mine:
            return
        baton.release()
        if mine is not None:
            mine.acquire()


class FakeClock:
    """The clock of one machine of a world. `jump_s`: by how much its wall clock is wrong."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.jump_s = 0.0

    def monotonic_s(self) -> float:
        return STARTED_MONOTONIC_S + self._world.now_s

    def wall_s(self) -> float:
        return STARTED_WALL_S + self._world.now_s + self.jump_s

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)
