"""What a run returns: `Result`, and the evaluations, recoveries and changes of hosts in it. Frozen values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Below either of these a rate says little; a window takes about two seconds.
SHORT_WINDOWS = 5
SHORT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Quality on the evaluation data after `step` steps.

    Attributes:
      auc: AUC of the scores; NaN where it has no meaning: labels other than 0 and 1, or one of them alone.
      log_loss: log loss of scores that are logits of label 1; NaN with other labels, and with a loss that takes scores
        for something else.
      metrics: name to value of the job's own metrics.
      loss: mean of the job's loss, weighted by the samples' weights.
      missing: name of a figure that has no meaning on these samples, to a sentence that says why.
    """

    step: int
    auc: float
    log_loss: float
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss: float = math.nan
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """AUC and the job's own metrics by the names under which they are printed, as far as they have a meaning."""
        return {**({} if math.isnan(self.auc) else {"AUC": self.auc}), **self.metrics}

    @property
    def losses(self) -> dict[str, float]:
        """The log loss and the job's loss by the names under which they are printed: the latter alone where it is
        another one.
        """
        is_same = is_same_loss(self.loss, self.log_loss)
        values = {"log loss": self.log_loss, "loss": math.nan if is_same else self.loss}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    @property
    def values(self) -> dict[str, float]:
        """All that has a meaning, by the names that `CheckpointConfig.metric` takes."""
        values = {"auc": self.auc, "log_loss": self.log_loss, "loss": self.loss}
        return {**{name: value for name, value in values.items() if not math.isnan(value)}, **self.metrics}

    @property
    def reasons(self) -> str:
        """Which figures are missing and why, to be written behind a sentence; empty if none is."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.missing.items():
            by_reason.setdefault(why, []).append(name)
        return "".join(f". No {', '.join(names)}: {why.rstrip('.')}" for why, names in by_reason.items())

    @property
    def comparable(self) -> dict[str, float]:
        """What policies compare; numbers that are not finite compare with nothing and are left out."""
        return {name: value for name, value in self.values.items() if math.isfinite(value)}


def is_same_loss(loss: float, log_loss: float) -> bool:
    """Whether a job's loss is the log loss, but for rounding; then it is printed once."""
    return math.isclose(loss, log_loss, rel_tol=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One fault and what it cost. Times are seconds.

    Attributes:
      generation: the generation that was started after it.
      cause: what happened, one line.
      base_step: step of the commit that the run went back to.
      discarded_steps: steps done since that commit, done again.
      detect_s: from the last finished step that a survivor reports to the driver's notice; an upper bound of the
        detection time.
      stop_s, start_s, restore_s, compile_s: parts of the recovery, one after another. The first lasts until what was
        lost is gone. Then come new processes, mesh and gang, then rows, as far as they took longer than the rest, then
        the model.
      parts_s: start_s and compile_s in more detail, by name; of what all device processes do at once, that of the
        slowest.
      undo_s, move_s, read_s: what the slowest host spent on undo in memory, on getting buckets from other hosts, and on
        reading; beside other parts.
      survivors: hosts whose process survived.
      buckets_kept: of all hosts, in their memory.
      buckets_moved, bytes_moved: of all hosts, from other hosts' memory.
      buckets_read, bytes_read: of all hosts, from storage.
    """

    generation: int
    cause: str
    base_step: int
    discarded_steps: int
    detect_s: float
    stop_s: float
    start_s: float
    restore_s: float
    compile_s: float
    parts_s: Mapping[str, float] = field(default_factory=dict)
    undo_s: float = 0.0
    move_s: float = 0.0
    read_s: float = 0.0
    survivors: int = 0
    buckets_kept: int = 0
    buckets_moved: int = 0
    bytes_moved: int = 0
    buckets_read: int = 0
    bytes_read: int = 0

    @property
    def total_s(self) -> float:
        return self.stop_s + self.start_s + self.restore_s + self.compile_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsChange:
    """A planned change of hosts at a commit, or of the plan of the tables on as many hosts.

    Attributes:
      generation: the one that was started for it.
      step: step of the commit; nothing was discarded.
      before, after: hosts.
      cause: one line.
      seconds: from the end of the last window before it to the next one.
    """

    generation: int
    step: int
    before: int
    after: int
    cause: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """What the first steps of a call asked of a table.

    Attributes:
      ids_per_sample: of all its features.
      distinct_share: distinct rows over ids, in a host's share of a batch.
      hot_share: of the ids, those that name one of the 256 most frequent rows.
      sent_bytes: bytes that a host sends for it in a step, in the mean; counted, not measured.
      step_s: seconds of a host in a step, in the mean: its share of the phases that go over tables, by the floats that
        it touches. Exchanges are left out.
      is_on_devices: devices look up in it, so hosts neither send nor spend anything for it.
    """

    name: str
    ids_per_sample: float
    distinct_share: float
    hot_share: float
    sent_bytes: float
    step_s: float
    is_on_devices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended.

    Attributes:
      path: folder of the run.
      step: steps trained in all, of `total_steps`.
      num_samples: samples trained by this call, without padding and without discarded steps.
      trained_s: seconds from the beginning of this call's first window of steps to the end of its last one, but for
        evaluations. Recoveries, changes of hosts, discarded steps and waiting for commits count.
      samples_per_s: `num_samples` over `trained_s`.
      median_samples_per_s: half of the steps that count went at least so fast, without the first window after each
        start: how fast it went while nothing was in the way.
      num_windows: number of windows whose steps count.
      losses: global loss of each step since this call began or last recovered to, by step number.
      changes: planned changes of hosts.
      phase_s: seconds of each phase of the step, summed over the windows of host 0.
      phase_cpu_s: of these, processor seconds of its working thread, and those between phases.
      commit: name of the newest commit, which is of `step`; also where this call was stopped before its first step, or
        between a recovery and the next step. None only where the run has none: `step` is 0, and nothing is lost.
      stopped_by: None when all steps are done, and the evaluation at the end where one is requested; else the reason.
      stopped_early: why the job's early stopping ended it; None where it did not. Nothing is left to train then.
      staleness: staleness as in the job.
      failed_saves: saves of this call that the storage failed; each was made up for by a later one.
      tables: what the first steps asked of each table, in the job's order; empty where nothing was trained.
    """

    path: str
    step: int
    total_steps: int
    num_samples: int
    samples_per_s: float
    losses: Mapping[int, float]
    evaluations: tuple[Evaluation, ...]
    recoveries: tuple[Recovery, ...]
    phase_s: Mapping[str, float]
    commit: str | None
    stopped_by: str | None = None
    stopped_early: str | None = None
    staleness: int = 0
    changes: tuple[HostsChange, ...] = ()
    failed_saves: int = 0
    trained_s: float = 0.0
    median_samples_per_s: float = 0.0
    num_windows: int = 0
    phase_cpu_s: Mapping[str, float] = field(default_factory=dict)
    tables: tuple[MeasuredTable, ...] = ()

    @property
    def is_short(self) -> bool:
        """Whether so little was trained that its rates say nothing about a longer run: caches were cold for much of
        it.
        """
        return self.num_windows < SHORT_WINDOWS or self.trained_s < SHORT_S
