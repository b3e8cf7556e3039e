"""Calls of a strategy to its processes, of which those of every step have a way of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate

from podembed.orchestrator.group.backend import Call
from podembed.orchestrator.group.calls import Answer, Arguments, Calls, Process
from podembed.orchestrator.stepwise.line_calls import LineHandle


@dataclass(frozen=True, slots=True)
class StepwiseCalls(Calls[Process]):
    """Calls to `workers.stepwise.host.StepwiseHost` or `workers.stepwise.device.StepwiseDevice`."""

    def directly(
        self,
        method: Callable[Concatenate[Process, Arguments], Answer],
        *arguments: Arguments.args,
        **unused: Arguments.kwargs,
    ) -> Call[Answer]:
        """A call that is made in every step."""
        if isinstance(self.handle, LineHandle):
            return self.handle.call_directly(method.__name__, *arguments)
        return self.handle.call(method.__name__, *arguments)
