"""Events of training: windows, evaluations, and what windows show of hosts, owners and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from podembed.embedding.vocabulary.policies import VocabularyCounts
from podembed.orchestrator.api.result import Evaluation, MeasuredTable
from podembed.orchestrator.api.save_policies import Order
from podembed.orchestrator.api.text import format_bytes, plural
from podembed.orchestrator.events.event import MOST_TABLES, Event, Level
from podembed.workers.data.unknown_values import UnknownColumn
from podembed.workers.host.row_norms import TableNorms
from podembed.workers.input.data_sample import DataSample
from podembed.workers.job.ranking import Baseline
from podembed.workers.job.window_figures import DenseNorms, LabelFigures
from podembed.workers.liveness.process_statistics import ProcessUsage
from podembed.workers.liveness.progress import Phase

# An owner of so many times its even share of a table's buckets is busy because of the placement.
UNEVEN_SHARE = 1.5
# Such as a model with a loss of its own, whose samples have one label or none.
NO_FIGURE = "no figure, since the job declares no metrics that these labels allow"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """State of a run after a window of steps.

    Attributes:
      loss: mean over the window's steps.
      phase_s: seconds a step of each phase, on host 0.
      committed_unix_s: time of the last commit, None before the first.
      staleness: staleness as in the job.
      slowest: own work time of the slowest host over that of the others; see `orchestrator.decisions.stragglers`.
      imbalance: rows asked of the busiest owner over the mean of all.
      failed_saves: saves that failed since the last commit.
      left_s: seconds to the end of the run at the pace of the last windows; None where that is not known yet.
    """

    step: int
    total_steps: int
    samples_per_s: float
    loss: float
    phase_s: Mapping[str, float]
    num_hosts: int
    generation: int
    committed_step: int
    committed_unix_s: float | None
    staleness: int
    slowest: float = 1.0
    imbalance: float = 1.0
    failed_saves: int = 0
    left_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMeasures:
    """What a host's processes did in a window.

    Attributes:
      num_samples: without padding.
      phase_s: seconds of each phase in the window.
      bytes_sent: to other hosts.
      rows_asked: per table, rows that all hosts asked of this one.
      vocabularies: per table whose keys come and go, what became of them on this host.
      usage: resource usage of the host process and of its device process; one where both are the same.
      data: histograms of some of its samples, where it looked. Only measurements are made of them.
    """

    host: int
    num_samples: int
    phase_s: Mapping[Phase, float]
    bytes_sent: int
    rows_asked: Mapping[str, int]
    usage: tuple[ProcessUsage, ...]
    vocabularies: Mapping[str, VocabularyCounts] = field(default_factory=dict)
    data: DataSample | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTrained(Event):
    """A window of steps is done.

    Attributes:
      first_step: steps done before it.
      num_samples: number of samples of all hosts, without padding.
      seconds: wall time.
      hosts: in their order.
      figures: of each label whose scores are log odds, before its samples were trained on.
      norms: norms of the dense half; None where they are not known.
      rates: learning rate of each trained table in the last step.
      tables: norms of samples of the largest tables' rows, where hosts looked.
      rounds: number of rounds of all steps in which devices asked for rows of sharded tables; 0 without such tables.
    """

    kind: ClassVar[str] = "window"
    flat: ClassVar[str] = "report"
    template = "trained up to step {report.step} of {report.total_steps}: loss {report.loss:.4f}"
    report: WindowReport
    first_step: int
    num_samples: int
    seconds: float
    hosts: tuple[HostMeasures, ...]
    figures: tuple[LabelFigures, ...] = ()
    norms: DenseNorms | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    tables: tuple[TableNorms, ...] = ()
    rounds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """The evaluation samples were scored.

    Attributes:
      best_auc: the best that any model can reach, where the job knows it.
      baseline: what a rule without learning reaches, where the job knows it.
      orders: of its own metrics that declare it, whether the highest (`max`) or the lowest (`min`) is the best.
    """

    kind: ClassVar[str] = "evaluation"
    flat: ClassVar[str] = "evaluation"
    evaluation: Evaluation
    best_auc: float | None
    baseline: Baseline | None
    orders: Mapping[str, Order] = field(default_factory=dict)

    def sentence(self) -> str:
        made = self.evaluation
        best = "" if self.best_auc is None else f"  (best reachable {self.best_auc:.4f})"
        losses = "  ".join(f"{name} {value:.4f}" for name, value in made.losses.items())
        shown = "  ".join(filter(None, ["  ".join(figures(made, self.baseline)) + best, losses]))
        return f"step {made.step:>6}  evaluation: {shown or NO_FIGURE}  on {made.num_samples:,} samples{made.reasons}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCut(Event):
    """A signal came before all evaluation samples were scored, so there are no figures of this step yet.

    Attributes:
      step: after which it began.
      seconds: seconds that were spent on it.
      reason: why the run ends.
    """

    template = (
        "{reason}: the evaluation after step {step} is cut after {seconds:.0f} s and gives no figures; "
        "`podembed resume` makes it first"
    )
    step: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEarly(Event):
    """Evaluations no longer get better, so training ends here (`JobConfig.early_stopping`).

    Attributes:
      reason: the metric, its best value and where it was.
    """

    template = "stopped early at step {step} of {total_steps}: {reason}"
    step: int
    total_steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramsCompiled(Event):
    """Sequences of a window, or of the evaluation before it, needed programs that were not there; see
    `workers.device.step_programs`.

    Attributes:
      step: at the end of the window.
      num_programs: number of programs that every device compiled.
      seconds: seconds that the slowest device took. The others waited for it.
      total: programs of this generation so far.
    """

    step: int
    num_programs: int
    seconds: float
    total: int

    def sentence(self) -> str:
        programs = plural(self.num_programs, "program")
        return (
            f"step {self.step}: compiled {programs} for bags or sequences of other lengths in {self.seconds:.1f} s, "
            f"{self.total} so far"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlow(Event, level=Level.WARNING):
    """A host worked much longer than the others for some windows.

    Attributes:
      ratio: its work time over the median of the others'.
      phase: the one that makes the most of the difference.
      phase_s, others_phase_s: seconds of a window in it, here and the median of the others.
    """

    template = (
        "host {host} is slow: {ratio:.1f} times the work time of the others, most of it in {phase} ({phase_s:.2f} s "
        "a window, the others {others_phase_s:.2f} s)"
    )
    host: int
    ratio: float
    phase: Phase
    phase_s: float
    others_phase_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKeepsUp(Event):
    """A host that was slow works as fast as the others again."""

    template = "host {host} keeps up with the others again"
    host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerBusy(Event, level=Level.WARNING):
    """Hosts request many more rows of one owner than of the others, which costs time. Only tables that are cut into
    buckets count.

    Attributes:
      ratio: its rows over the mean of all owners.
      rows: asked of it in a window.
      table: table that adds the most to it.
      held_buckets, num_buckets: of that table, those that it owns and all.
    """

    host: int
    ratio: float
    rows: int
    table: str
    held_buckets: int
    num_buckets: int
    num_hosts: int

    def sentence(self) -> str:
        what = (
            f"host {self.host} gets requests for {self.ratio:.1f} times the rows of the mean owner ({self.rows:,} in a "
            f"window, of tables that are cut), most of them of table '{self.table}'."
        )
        # One host cannot have less than a bucket, so a table of few buckets is uneven whatever its ids are.
        if self.held_buckets * self.num_hosts >= UNEVEN_SHARE * self.num_buckets > 0:
            return (
                f"{what} It owns {self.held_buckets} of the table's {plural(self.num_buckets, 'bucket')}, which is "
                "why. Fewer hosts would be busy more evenly"
            )
        return (
            f"{what} Its ids fall on few buckets. Spread them, such as by a hash with a seed, before they are looked up"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersEven(Event):
    """Rows are asked of all owners evenly again."""

    template = "rows are asked of all owners evenly again"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsAltered(Event, level=Level.WARNING):
    """Ids outside the vocabulary of a table were dropped, clipped or hashed; told once a table.

    Attributes:
      count: of them in the first window or evaluation that had some.
      invalid_ids: what happens to them: `drop`, `clip` or `hash`.
    """

    table: str
    count: int
    invalid_ids: str

    def sentence(self) -> str:
        done = {"drop": "dropped", "clip": "clipped", "hash": "hashed"}.get(self.invalid_ids, "altered")
        return (
            f"{self.count:,} ids outside the vocabulary of table '{self.table}' in a window or an evaluation were "
            f"{done}, as its invalid_ids='{self.invalid_ids}' says. Later ones are counted without a notice"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysRefused(Event, level=Level.WARNING):
    """Keys asked for a row of a table and found its buckets full; told once a table.

    Attributes:
      count: how many did in the first window that had some, once a step.
      num_keys, num_rows: how many keys have a row, and how many rows there are.
    """

    table: str
    count: int
    num_keys: int
    num_rows: int

    def sentence(self) -> str:
        return (
            f"{self.count:,} times in a window, a key found no free row in table '{self.table}', where "
            f"{self.num_keys:,} keys have {self.num_rows:,} rows. It is looked up as the table's default says. Go on "
            "with a larger capacity, or with an evict policy or forget_after. Later ones are counted without a "
            "notice"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysReturned(Event, level=Level.WARNING):
    """Many of the keys that get a row had lost one not long before; told once a table.

    Attributes:
      returned, admitted: how many keys got a row in a window, and how many of them had one before.
    """

    table: str
    returned: int
    admitted: int

    def sentence(self) -> str:
        return (
            f"{self.returned:,} of {self.admitted:,} keys that got a row in table '{self.table}' in a window had lost "
            "one not long before, and begin anew. Go on with a larger capacity or forget_after, or with "
            "evict=LeastFrequent(...) or a larger MinCount. Later ones are counted without a notice"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketsFullEarly(Event, level=Level.WARNING):
    """Buckets of a table have no free row, though the table has; told once a table.

    Attributes:
      num_full, num_buckets: how many buckets are full, and how many there are.
      fill: share of all rows that have a key.
    """

    table: str
    num_full: int
    num_buckets: int
    fill: float

    def sentence(self) -> str:
        return (
            f"{self.num_full:,} of {self.num_buckets:,} buckets of table '{self.table}' are full, while "
            f"{self.fill:.0%} of its rows have a key. Keys fall into buckets by their hash, so somebody may have "
            "chosen these. Look at where they come from. A feature with mode='hash' and a salt of its own has other "
            "buckets"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesMeasured(Event):
    """The first steps of a call have shown what samples request of each table.

    Attributes:
      step: after which it was looked at.
      tables: in the job's order.
    """

    step: int
    tables: tuple[MeasuredTable, ...]

    def sentence(self) -> str:
        slowest = sorted(self.tables, key=lambda table: -table.step_s)[:MOST_TABLES]
        each = "; ".join(
            f"{table.name} {_took(table)} ({table.ids_per_sample:.3g} ids a sample, {table.distinct_share:.0%} "
            f"distinct, {table.hot_share:.0%} of 256 rows{_sent(table)})"
            for table in slowest
        )
        return f"step {self.step}: ms a step of a host for each of {plural(len(self.tables), 'table')}: {each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnUnknown(Event, level=Level.WARNING):
    """No value of a column that has been read is in its vocabulary; told once a column."""

    flat: ClassVar[str] = "found"
    template = "{found}"
    found: UnknownColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPutAside(Event, level=Level.WARNING):
    """Malformed rows were left out.

    Attributes:
      num_rows: in the run so far.
      location: where they are listed.
    """

    template = "{num_rows} malformed rows left out so far, listed in {location}"
    num_rows: int
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReason:
    """How a table lies.

    Attributes:
      num_hosts: number of hosts that have some of it.
      is_pooled: its owners pool the bags of its features; otherwise rows travel.
      why: in words.
      is_on_devices: each device holds all of it, and hosts keep what was committed.
    """

    table: str
    num_hosts: int
    is_pooled: bool
    why: str
    is_on_devices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesPlanned(Event):
    """A generation follows a recorded plan for its tables.

    Attributes:
      step: from which on.
      why: which plan it is.
      step_s, other_s: predicted seconds of the hosts in a step with it, and with the plan before it, or the rule.
      tables: in the job's order.
    """

    step: int
    num_hosts: int
    why: str
    step_s: float
    other_s: float
    tables: tuple[TableReason, ...]

    def sentence(self) -> str:
        named = [
            f"{table.table} on {'the devices' if table.is_on_devices else plural(table.num_hosts, 'host')}: {table.why}"
            for table in self.tables
        ]
        more = f"; and {plural(len(named) - MOST_TABLES, 'more table')}" if len(named) > MOST_TABLES else ""
        return (
            f"plan of the tables from step {self.step} on: {self.why}; the hosts take {1e3 * self.step_s:.2f} ms a "
            f"step as predicted, {1e3 * self.other_s:.2f} without it; {'; '.join(named[:MOST_TABLES])}{more}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlanned(Event):
    """The run has recorded plans, but none for these hosts, so tables lie by the rule."""

    template = "tables lie by size and features: {reason}"
    reason: str


def figures(evaluation: Evaluation, baseline: Baseline | None) -> list[str]:
    """AUC, where it has a meaning, and the job's own metrics in words, each with the baseline's behind it where that is
    known.
    """
    known = {} if baseline is None else baseline.figures
    return [
        f"{name} {value:.4f}" + (f" ({baseline.name} {known[name]:.4f})" if baseline and name in known else "")
        for name, value in evaluation.figures.items()
    ]


def _took(table: MeasuredTable) -> str:
    return "on the devices" if table.is_on_devices else f"{1e3 * table.step_s:.2f}"


def _sent(table: MeasuredTable) -> str:
    return "" if table.is_on_devices else f", sends {format_bytes(table.sent_bytes)}"
