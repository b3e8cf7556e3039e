"""`StepTrace`: what the driver says to a trace of steps. This one traces nothing; a driver may be given another."""

from __future__ import annotations

from collections.abc import Collection

from podembed.orchestrator.group.process_group import ProcessGroup
from podembed.workers.liveness.worker import Worker
from podembed.workers.tracing.recorder import Recorder

NEVER = 1 << 62
"""A step that no run reaches."""


class StepTrace:
    """Called in the driver's thread. Nothing that it does may harm the run.

    Attributes:
      driver: recorder of what the driver does, which is on while a trace is under way.
    """

    def __init__(self, driver: Recorder | None = None) -> None:
        self.driver = driver or Recorder()

    def begin(self, step: int, total_steps: int, *, generation: int) -> None:
        """A generation trains from `step` on."""

    def boundary(self, step: int) -> int:
        """A step after `step` that no window passes."""
        return NEVER

    def before(self, group: ProcessGroup, step: int) -> None:
        """The group is about to train `step`."""

    def after(self, step: int) -> None:
        """Everything before `step` has been trained."""

    def leave(self) -> None:
        """The generation has ended in order; its processes are still there."""

    def cut(self, reason: str, lost: Collection[Worker] = ()) -> None:
        """The generation ends out of order, in the middle of a trace or elsewhere.

        Args:
          lost: processes that will not answer any more.
        """

    def close(self) -> None:
        """The driver ends."""
