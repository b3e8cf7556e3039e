"""Events of a run as a whole: its driver, its generations, its faults, and what changed since it was begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from podembed.orchestrator.api.result import HostsChange, Recovery
from podembed.orchestrator.api.text import format_bytes, plural
from podembed.orchestrator.events.event import MOST_TABLES, Event, Level

NOTABLE_PART_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverBegan(Event):
    """A driver begins; in the event log alone."""

    kind: ClassVar[str] = "begin"
    template = "a driver begins"


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

    def sentence(self) -> str:
        return f"the driver ends: {self.error}: {self.message}" if self.error else "the driver ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened(Event):
    """The run is about to be trained."""

    template = "run folder {url}"
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackFailed(Event, level=Level.WARNING):
    """A callback of the job raised, or did not come back in time; the run goes on. Told once for each error.

    Attributes:
      callback: its type.
      method: method that was called.
      trace: recorder of the exception, with its lines; empty for one that did not come back.
    """

    template = "callback {callback} failed in {method}: {error}. The run goes on without what it did there.\n{trace}"
    callback: str
    method: str
    error: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbacksLeft(Event, level=Level.WARNING):
    """The run has ended, but a callback has not come back; it is left behind.

    Attributes:
      untold: calls that no callback has heard.
    """

    template = (
        "a callback has not come back within {waited_s:.0f} s of the end, and is left behind; {untold} calls were "
        "not made"
    )
    waited_s: float
    untold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailed(Event, level=Level.WARNING):
    """A sink of measurements failed or was too slow; the run goes on. Told once for each error.

    Attributes:
      sink: such as the port or the folder.
      dropped: lines that it has missed for that.
    """

    template = "measurements do not reach {sink}: {error}. The run goes on without; {dropped} lines were dropped"
    sink: str
    error: str
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsServed(Event):
    """Prometheus finds the run's measurements at a port of the driver's machine."""

    template = "measurements for Prometheus: http://localhost:{port}/metrics"
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingLeft(Event):
    """All steps of the run are done."""

    template = "nothing is left to do in {url}: step {step} is committed as {commit}"
    url: str
    step: int
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesInOrder(Event):
    """Samples come in the order of the files.

    Attributes:
      description: the order, and a hint where it may not be the one that is meant.
    """

    template = "{description}"
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNotFilled(Event, level=Level.WARNING):
    """A batch is larger than the data, so that an epoch is one step, and the rest of the batch is padding."""

    template = (
        "batch_size is {batch_size:,} and the data has {num_samples:,} samples, so an epoch is one step, filled up "
        "with padding. Lower batch_size, or see whether all of the data is there"
    )
    batch_size: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesWithoutStep(Event, level=Level.WARNING):
    """Learning rates of tables are functions that do not take the step. What they count themselves is in no commit."""

    tables: tuple[str, ...]

    def sentence(self) -> str:
        names = ", ".join(self.tables[:MOST_TABLES]) + (", ..." if len(self.tables) > MOST_TABLES else "")
        return (
            f"the learning rate of {plural(len(self.tables), 'table')} ({names}) is a function without the step. "
            "Whenever the run is resumed, or goes on after a fault, it begins anew with all that it counts. Give the "
            "function the step: def rate(step)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroupsShared(Event, level=Level.WARNING):
    """Lanes share large row groups, and each of them decodes a whole one for its part of the rows.

    Attributes:
      num_rows: number of rows of the data.
      num_columns: number of columns that are read of each row.
    """

    template = (
        "{num_rows:,} rows of {num_columns:,} columns lie in {num_row_groups} row groups or blocks, and each of "
        "{num_lanes} lanes decodes a whole one for its part of it, which takes time. Write the data with row "
        "groups of some ten thousand rows, many more than lanes, or lower num_lanes"
    )
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

    def sentence(self) -> str:
        origin = f"from commit {self.commit}" if self.commit else "from the first step"
        lived = f"; hosts that lived on: {self.survivors}, {_restore(self.restore)}" if self.survivors else ""
        return (
            f"generation {self.generation}: {plural(self.num_hosts, 'host')}, {origin}; started in {self.start_s:.1f} "
            f"s, compiled in {self.compile_s:.1f} s{lived}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLost(Event, level=Level.WARNING):
    """A fault ended a generation.

    Attributes:
      cause: one line.
      workers: the processes that failed, such as `host 1`; without those that only report others.
      fault: what it is charged to, such as `host` or `preemption`; see `orchestrator.decisions.failure.FaultClass`.
      base_step: to which the next generation goes back.
    """

    template = "fault: {cause}"
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

    def sentence(self) -> str:
        cost = self.recovery
        return (
            f"recovered in {cost.total_s:.1f} s as generation {cost.generation}: {cost.discarded_steps} steps "
            f"discarded, back at step {cost.base_step}. Noticed within {cost.detect_s:.1f} s, "
            f"stop {cost.stop_s:.1f} s, start {cost.start_s:.1f} s, restore {cost.restore_s:.1f} s, "
            f"compile {cost.compile_s:.1f} s{_parts(cost)}{_kept(cost)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded(Event):
    """A generation ends in order, with everything committed, for other hosts or another plan."""

    template = "generation {generation} ends in order: {reason}"
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsChanged(Event):
    """A generation runs with other hosts than the one before, or with another plan."""

    flat: ClassVar[str] = "change"
    change: HostsChange

    def sentence(self) -> str:
        change = self.change
        if change.before == change.after:
            hosts = plural(change.after, "host")
            return f"{hosts} go on from step {change.step} after {change.seconds:.1f} s: {change.cause}"
        return (
            f"hosts changed from {change.before} to {change.after} at step {change.step} in {change.seconds:.1f} s: "
            f"{change.cause}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsDropped(Event, level=Level.WARNING):
    """The hosts that lived on are not used; all processes are started anew."""

    template = "the hosts that lived on are ended and all processes are started anew: {reason}"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersKilled(Event, level=Level.WARNING):
    """Workers did not leave in order at the end of the run. All was committed by then."""

    template = "workers were ended without leaving in order: {reason}"
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
    template = "{description}"
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsDiffer(Event, level=Level.WARNING):
    """The commit to start from was written by other versions.

    Attributes:
      versions: by package, that of the commit and that of now.
    """

    commit: str
    versions: Mapping[str, tuple[str | None, str]]

    def sentence(self) -> str:
        told = ", ".join(f"{name} {was} (now {now})" for name, (was, now) in self.versions.items())
        return f"commit {self.commit} was written with {told}; the run may not repeat bit by bit from here"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged(Event):
    """Arguments of the job's function are others from `step` on.

    Attributes:
      changes: such as `learning_rate 0.05 -> 0.02`.
    """

    template = "settings changed from step {step} on: {changes}"
    step: int
    changes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFilesChanged(Event, level=Level.WARNING):
    """Data files, or what the job makes of their columns, are others from `step` on, which was accepted.

    Attributes:
      changes: a phrase each.
      shown: the first of them, in words.
    """

    template = "the input changed, accepted from step {step} on: {shown}"
    step: int
    changes: tuple[str, ...]
    shown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecordDamaged(Event, level=Level.WARNING):
    """A record of the run's data files is damaged and ignored."""

    template = "a record of the run's data files is damaged and ignored: {file} ({found})"
    file: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecordRewritten(Event):
    """The record of the data files was damaged, and written again from the files."""

    template = (
        "{file} was damaged or gone; it was written again from the data files, which are those that the run began with"
    )
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeaningRecorded(Event, level=Level.WARNING):
    """What the rows of an older run mean was not recorded. It is from now on, as the job has it."""

    template = (
        "an older version began this run and did not record how values become rows. {file} has it from now on, as the "
        "job says it today: whether that was changed before is not known"
    )
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeaningUnknown(Event, level=Level.WARNING):
    """What the rows mean that a run begins from is not recorded, so they are not compared with those of the job."""

    template = (
        "the run in {location} has no record of how values become rows, so it is not compared with the job. Tables "
        "without names are matched by their position: see to it that columns, vocabularies and salts are the same"
    )
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatorKept(Event, level=Level.WARNING):
    """The job's `initial_accumulator_value` is not the one that the run keeps.

    Attributes:
      found: that of the job.
      kept: the one that it began with.
    """

    template = (
        "the job has initial_accumulator_value={found:g}, which changes nothing: the run keeps the {kept:g} that it "
        "began with"
    )
    found: float
    kept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesIgnored(Event, level=Level.WARNING):
    """The record of which commits stay is damaged; all stay, unless flags say otherwise."""

    template = (
        "the record of which commits stay is damaged and ignored: {file} ({found}). All commits stay, unless flags "
        "say otherwise (--keep, --keep-every, --keep-best)"
    )
    file: str
    found: str


def _parts(recovery: Recovery) -> str:
    """What a start consists of, the parts that anybody would notice."""
    long = [f"{name} {seconds:.1f}" for name, seconds in recovery.parts_s.items() if seconds >= NOTABLE_PART_S]
    return f" (of these: {', '.join(long)})" if long else ""


def _kept(recovery: Recovery) -> str:
    """What the hosts that lived on spared."""
    if not recovery.survivors:
        return ""
    return f"; hosts that lived on: {recovery.survivors}, {_restore(asdict(recovery))}"


def _restore(totals: Mapping[str, Any]) -> str:
    """The sources of a generation's rows, with numbers."""
    moved = ""
    if totals["buckets_moved"]:
        size = format_bytes(totals["bytes_moved"])
        moved = f", moved {totals['buckets_moved']} from host to host ({size} in {totals['move_s']:.1f} s)"
    size = format_bytes(totals["bytes_read"])
    return (
        f"buckets kept {totals['buckets_kept']} (undone in {totals['undo_s']:.1f} s){moved}, "
        f"read {totals['buckets_read']} ({size} in {totals['read_s']:.1f} s)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlaced:
    """Where a table with place='auto' lies in this start of a run: `host` or `sharded`, and why, in words."""

    table: str
    place: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesChosen(Event):
    """The places of tables with place='auto' were chosen.

    Attributes:
      tables: in the job's order.
    """

    tables: tuple[TablePlaced, ...]

    def sentence(self) -> str:
        named = [
            f"{one.table} on {'hosts' if one.place == 'host' else 'the devices'} ({one.why})" for one in self.tables
        ]
        more = f"; and {plural(len(named) - MOST_TABLES, 'more table')}" if len(named) > MOST_TABLES else ""
        return f"places of tables: {'; '.join(named[:MOST_TABLES])}{more}"
