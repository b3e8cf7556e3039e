"""Events of a run as a whole: its driver, its generations, its faults, and what changed since it was begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from podembed.orchestrator.api.result import HostsChange, Recovery
from podembed.orchestrator.events.event import Event, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverBegan(Event):
    """A driver begins; in the event log alone."""

    kind: ClassVar[str] = "begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEnded(Event):
    """A driver ends; in the event log alone.

    Attributes:
      error: type of the exception that ended it; None where it ended well.
      message: message of that exception.
    """

    kind: ClassVar[str] = "end"
    error: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened(Event):
    """The run is about to be trained."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackFailed(Event):
    """A callback of the job raised, or did not come back in time; the run goes on. Told once for each error.

    Attributes:
      callback: its type.
      method: method that was called.
      trace: recorder of the exception, with its lines; empty for one that did not come back.
    """

    level: ClassVar[Level] = Level.WARNING
    callback: str
    method: str
    error: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbacksLeft(Event):
    """The run has ended, but a callback has not come back; it is left behind.

    Attributes:
      untold: calls that no callback has heard.
    """

    level: ClassVar[Level] = Level.WARNING
    waited_s: float
    untold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailed(Event):
    """A sink of measurements failed or was too slow; the run goes on. Told once for each error.

    Attributes:
      sink: such as the port or the folder.
      dropped: lines that it has missed for that.
    """

    level: ClassVar[Level] = Level.WARNING
    sink: str
    error: str
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsServed(Event):
    """Prometheus finds the run's measurements at a port of the driver's machine."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingLeft(Event):
    """All steps of the run are done."""

    url: str
    step: int
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesInOrder(Event):
    """Samples come in the order of the files.

    Attributes:
      description: the order, and a hint where it may not be the one that is meant.
    """

    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNotFilled(Event):
    """A batch is larger than the data, so that an epoch is one step, and the rest of the batch is padding."""

    level: ClassVar[Level] = Level.WARNING
    batch_size: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesWithoutStep(Event):
    """Learning rates of tables are functions that do not take the step. What they count themselves is in no commit."""

    level: ClassVar[Level] = Level.WARNING
    tables: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroupsShared(Event):
    """Lanes share large row groups, and each of them decodes a whole one for its part of the rows.

    Attributes:
      num_rows: number of rows of the data.
      num_columns: number of columns that are read of each row.
    """

    level: ClassVar[Level] = Level.WARNING
    num_row_groups: int
    num_lanes: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted(Event):
    """A generation runs, and no fault came before it. After a fault `Recovered` says so.

    Attributes:
      commit, base_step: that it starts from; None and 0 for the first step.
      start_s, compile_s: parts of its start, one after another.
      survivors: hosts whose process lived on from the generation before.
      restore: where the rows came from, as in `Recovered`.
      slices: fields of `ScalingConfig` that say on what slices, for who goes on with the run; None where hosts count.
    """

    generation: int
    num_hosts: int
    commit: str | None
    base_step: int
    start_s: float
    compile_s: float
    survivors: int
    restore: Mapping[str, Any]
    slices: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLost(Event):
    """A fault ended a generation.

    Attributes:
      cause: one line.
      workers: the processes that failed, such as `host 1`; without those that only report others.
      fault: what it is charged to, such as `host` or `preemption`; see `orchestrator.decisions.failure.FaultClass`.
      base_step: to which the next generation goes back.
    """

    level: ClassVar[Level] = Level.WARNING
    generation: int
    cause: str
    workers: tuple[str, ...]
    fault: str
    base_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Event):
    """A generation runs after a fault."""

    kind: ClassVar[str] = "recovery"
    flat: ClassVar[str] = "recovery"
    recovery: Recovery

    def values(self) -> dict[str, Any]:
        # `super()` does not find its class in one that was made again for its slots.
        return Event.values(self) | {"total_s": self.recovery.total_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded(Event):
    """A generation ends in order, with everything committed, for other hosts or another plan."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsChanged(Event):
    """A generation runs with other hosts than the one before, or with another plan."""

    flat: ClassVar[str] = "change"
    change: HostsChange


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsDropped(Event):
    """The hosts that lived on are not used; all processes are started anew."""

    level: ClassVar[Level] = Level.WARNING
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersKilled(Event):
    """Workers did not leave in order at the end of the run. All was committed by then."""

    level: ClassVar[Level] = Level.WARNING
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStarted(Event):
    """A run without a commit begins from one of another run.

    Attributes:
      run_id, commit: that it begins from.
      description: a table of what comes from where.
    """

    run_id: str
    commit: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsDiffer(Event):
    """The commit to start from was written by other versions.

    Attributes:
      versions: by package, that of the commit and that of now.
    """

    level: ClassVar[Level] = Level.WARNING
    commit: str
    versions: Mapping[str, tuple[str | None, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged(Event):
    """Arguments of the job's function are others from `step` on.

    Attributes:
      changes: such as `learning_rate 0.05 -> 0.02`.
    """

    step: int
    changes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFilesChanged(Event):
    """Data files, or what the job makes of their columns, are others from `step` on, which was accepted.

    Attributes:
      changes: a phrase each.
      shown: the first of them, in words.
    """

    level: ClassVar[Level] = Level.WARNING
    step: int
    changes: tuple[str, ...]
    shown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecordDamaged(Event):
    """A record of the run's data files is damaged and ignored."""

    level: ClassVar[Level] = Level.WARNING
    file: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecordRewritten(Event):
    """The record of the data files was damaged, and written again from the files."""

    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeaningRecorded(Event):
    """What the rows of an older run mean was not recorded. It is from now on, as the job has it."""

    level: ClassVar[Level] = Level.WARNING
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeaningUnknown(Event):
    """What the rows mean that a run begins from is not recorded, so they are not compared with those of the job."""

    level: ClassVar[Level] = Level.WARNING
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatorKept(Event):
    """The job's `initial_accumulator_value` is not the one that the run keeps.

    Attributes:
      found: that of the job.
      kept: the one that it began with.
    """

    level: ClassVar[Level] = Level.WARNING
    found: float
    kept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesIgnored(Event):
    """The record of which commits stay is damaged; all stay, unless flags say otherwise."""

    level: ClassVar[Level] = Level.WARNING
    file: str
    found: str
