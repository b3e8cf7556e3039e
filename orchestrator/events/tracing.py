"""Events of the trace of some steps."""

from __future__ import annotations

from dataclasses import dataclass

from podembed.orchestrator.api.text import format_bytes
from podembed.orchestrator.events.event import Event, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessClock:
    """A process's clock against the driver's.

    Attributes:
      offset_s: what it shows when the driver's shows 0.
      uncertainty_s: the true offset differs by at most so much.
    """

    process: str
    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWritten(Event):
    """A trace is in the run's folder.

    Attributes:
      location: its path or URL.
      first_step, last_step: the last one is not in it.
      num_spans: that it holds.
      num_dropped: number of dropped that found no room in a process.
      clocks: clocks of all processes in it but the driver.
      missing: processes that did not answer when the trace was gathered.
      fault: fault that ended the trace before the last step was done, in words; empty if none did.
      without_jax: device processes of which JAX's profile was requested and could not be had, each with the reason.
    """

    location: str
    first_step: int
    last_step: int
    size_bytes: int
    num_spans: int
    num_dropped: int
    clocks: tuple[ProcessClock, ...]
    missing: tuple[str, ...]
    fault: str = ""
    without_jax: tuple[str, ...] = ()

    def sentence(self) -> str:
        clocks = ", ".join(
            f"{one.process} {one.offset_s * 1e3:+.3f} ± {one.uncertainty_s * 1e3:.3f} ms" for one in self.clocks
        )
        dropped = f" {self.num_dropped:,} spans found no room." if self.num_dropped else ""
        fault = f" A fault ended it: {self.fault.rstrip('.')}." if self.fault else ""
        missing = f" Without {', '.join(self.missing)}, which did not answer." if self.missing else ""
        jax = f" JAX's profile is not in it: {'; '.join(self.without_jax)}." if self.without_jax else ""
        return (
            f"traced steps {self.first_step} to {self.last_step - 1}: {self.location} "
            f"({format_bytes(self.size_bytes)}, {self.num_spans:,} spans). Open it at https://ui.perfetto.dev. Clocks "
            f"against the driver's: {clocks or 'of none'}.{fault}{dropped}{missing}{jax}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCut(Event, level=Level.WARNING):
    """Fewer steps will be traced than were asked.

    Attributes:
      asked: the steps that were asked, such as `20:25`.
      first_step, last_step: first step and last step that will be traced; the last one will not.
    """

    template = "the trace of steps {asked} begins at step {first_step} and ends before step {last_step}: {reason}"
    asked: str
    first_step: int
    last_step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLost(Event, level=Level.WARNING):
    """There is no trace of steps that were to be traced. Training is as without it.

    Attributes:
      asked: the steps that were asked, such as `20:25`.
    """

    template = "NO TRACE of steps {asked}: {reason}. Training is as without it"
    asked: str
    reason: str
