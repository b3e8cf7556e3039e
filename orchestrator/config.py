"""How, where and how long a job runs: the frozen values that a user passes beside a `JobConfig`, and the `Result` that comes back.

The names are those of Ray Train. Nothing here starts anything; `orchestrator.driver` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from orchestrator.keep_policies import KeepBest, KeepEvery, KeepPolicy
from orchestrator.save_policies import AfterEvaluation, EverySeconds, EverySteps, MetricName, OnBest, SavePolicy


class ConfigurationError(ValueError):
    """Settings that cannot work; retrying does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Hosts of a run.

    Attributes:
      num_hosts: hosts that train together.
      threads_per_host: threads of a host's kernels and of its CPU device; None leaves the libraries' own choice.
      resources_per_host: Ray resources reserved for each host, such as `{"CPU": 8, "TPU": 4}`; None takes an even part of the
        cluster's CPUs, at most one.
      in_process: one host inside the driver's own process, without Ray.
    """

    num_hosts: int = 1
    threads_per_host: int | None = None
    resources_per_host: Mapping[str, float] | None = None
    in_process: bool = False

    def __post_init__(self) -> None:
        if self.num_hosts < 1:
            raise ConfigurationError(f"Found num_hosts={self.num_hosts}. Expected at least 1.")
        if self.threads_per_host is not None and self.threads_per_host < 1:
            raise ConfigurationError(f"Found threads_per_host={self.threads_per_host}. Expected at least 1, or None.")
        if self.in_process and self.num_hosts != 1:
            raise ConfigurationError(
                f"Found in_process with num_hosts={self.num_hosts}. Expected one host. Leave in_process out to use several."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to commit and what to keep. The last step, and a stop by a signal, are committed in any case.

    Attributes:
      every_steps, every_seconds: commit when so many have passed since the last commit; both, where both are given. With neither of them
        nor `on_best`, commit after evaluations.
      on_best: commit after an evaluation that is better than that of every commit so far.
      metric: what "best" means here: the highest `auc` or the lowest `log_loss`.
      num_to_keep: newest commits kept, at least 2; None keeps all.
      keep_every_steps: also keep the first commit at or after each multiple of so many steps.
      keep_best: also keep so many commits with the best metric. Only commits made right after an evaluation have one.
      read_back: read every byte back and compare it before a commit is published, for storage that is not trusted to keep what it
        accepted. Otherwise the sizes of all files are compared.
      full_every: every so many commits hold all rows; those between hold only the rows that changed since the commit before, and need the
        files of the commits back to the last full one, which are then kept as long as they are. 1 makes all commits full.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    on_best: bool = False
    metric: MetricName = "auc"
    num_to_keep: int | None = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    read_back: bool = False
    full_every: int = 1

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_every_steps"):
            steps = getattr(self, name)
            if steps is not None and steps < 1:
                raise ConfigurationError(f"Found {name}={steps}. Expected at least 1, or None.")
        if self.every_seconds is not None and not 0 < self.every_seconds < math.inf:
            raise ConfigurationError(f"Found every_seconds={self.every_seconds}. Expected seconds above 0, or None.")
        if self.metric not in get_args(MetricName):
            raise ConfigurationError(
                f"Found metric={self.metric!r}. Expected one of {', '.join(get_args(MetricName))}. Choose one of them."
            )
        if self.keep_best < 0:
            raise ConfigurationError(f"Found keep_best={self.keep_best}. Expected at least 0.")
        if self.num_to_keep is not None and self.num_to_keep < 2:
            raise ConfigurationError(
                f"Found num_to_keep={self.num_to_keep}. Expected at least 2, so that a damaged commit has an ancestor, or None."
            )
        if self.full_every < 1:
            raise ConfigurationError(f"Found full_every={self.full_every}. Expected at least 1, which makes all full.")

    @property
    def save_policies(self) -> tuple[SavePolicy, ...]:
        """When to commit on the way."""
        policies: list[SavePolicy] = []
        if self.every_steps is not None:
            policies.append(EverySteps(self.every_steps))
        if self.every_seconds is not None:
            policies.append(EverySeconds(self.every_seconds))
        if self.on_best:
            policies.append(OnBest(self.metric))
        return tuple(policies) or (AfterEvaluation(),)

    @property
    def keep_policies(self) -> tuple[KeepPolicy, ...]:
        """What to keep besides the newest; of no effect where all are kept."""
        policies: list[KeepPolicy] = []
        if self.keep_every_steps is not None:
            policies.append(KeepEvery(self.keep_every_steps))
        if self.keep_best:
            policies.append(KeepBest(self.keep_best, self.metric))
        return tuple(policies)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """What a run bears.

    Attributes:
      max_failures: host faults in a row without a new commit before the run stops.
      step_timeout_s: seconds without any finished step after which the group is taken for hung.
      start_timeout_s: seconds for processes to start, join, restore and compile.
    """

    max_failures: int = 3
    step_timeout_s: float = 120.0
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.max_failures < 0:
            raise ConfigurationError(f"Found max_failures={self.max_failures}. Expected at least 0.")
        if self.step_timeout_s <= 0 or self.start_timeout_s < 1:
            raise ConfigurationError(
                f"Found step_timeout_s={self.step_timeout_s} and start_timeout_s={self.start_timeout_s}. "
                f"Expected seconds above 0, and at least 1 to start."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Where a new run begins, instead of with initial values. Step, data and schedules begin anew; only state is taken over.

    Attributes:
      source: `RUN`, for the newest commit at that time, or `RUN@COMMIT`.
      rules: what is meant by each difference between the commit and the job, such as `users=rename=members`, `ads=reinit`, `old=drop`,
        `items=rows`, `@dense=params`; see `orchestrator.warm_start`.
    """

    source: str
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Name and place of a run, and its policies.

    Attributes:
      name: folder of the run below `storage_path`; None makes one from the job's name and the time.
      storage_path: local folder or fsspec URL that every host reaches.
      eval_every_steps: steps between evaluations; None evaluates at the end only.
      evaluate_at_end: whether the finished model is evaluated, where the data declares evaluation files.
      max_steps: stop after this many steps of the whole run; None trains all epochs.
      take_over: fence another driver that still holds this run.
      warm_start: another run's commit that a new run begins from; None begins with initial values.
      single_writer: accept a storage that cannot create files exclusively, where nothing stops a second driver.
      accept_input_change: go on with a run although its data files are not those that it began with.
    """

    name: str | None = None
    storage_path: str = ".runs"
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    eval_every_steps: int | None = None
    evaluate_at_end: bool = True
    max_steps: int | None = None
    take_over: bool = False
    warm_start: WarmStart | None = None
    single_writer: bool = False
    accept_input_change: bool = False

    def __post_init__(self) -> None:
        for name in ("eval_every_steps", "max_steps"):
            steps = getattr(self, name)
            if steps is not None and steps < 1:
                raise ConfigurationError(f"Found {name}={steps}. Expected at least 1, or None.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Quality on the evaluation data after `step` steps.

    Attributes:
      metrics: name to value of the job's own metrics.
    """

    step: int
    auc: float
    log_loss: float
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """AUC and the job's own metrics by the names under which they are printed."""
        return {"AUC": self.auc, **self.metrics}

    @property
    def comparable(self) -> dict[str, float]:
        """What policies compare; numbers that are not finite compare with nothing and are left out."""
        values = {"auc": self.auc, "log_loss": self.log_loss, **self.metrics}
        return {name: value for name, value in values.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One fault and what it cost. Times are seconds.

    Attributes:
      generation: the generation that was started after it.
      cause: what happened, one line.
      base_step: step of the commit that the run went back to.
      discarded_steps: steps done since that commit, done again.
      detect_s: from the last finished step that a survivor reports to the driver's notice; an upper bound of the detection time.
      stop_s, start_s, restore_s, compile_s: parts of the way back.
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

    @property
    def total_s(self) -> float:
        return self.stop_s + self.start_s + self.restore_s + self.compile_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended.

    Attributes:
      path: folder of the run.
      step: steps trained in all, of `total_steps`.
      num_samples: samples trained by this call, without padding and without discarded steps.
      samples_per_s: median over windows.
      losses: global loss of each step since this call began or last recovered to, by step number.
      phase_s: seconds of each phase of the step, summed over the windows of host 0.
      stopped_by: None when all steps are done, else the reason.
      staleness: as in the job.
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
    staleness: int = 0
