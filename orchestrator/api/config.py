"""How, where and how long a job runs: the frozen values that a user passes beside a `JobConfig`.

The names are those of Ray Train. Nothing here starts anything; `orchestrator.driver.driver` does. What comes back is in
`result`, and which of these values go with which job in `policy_checks`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TypeVar, get_args

from podembed.orchestrator.api.configuration_error import ConfigurationError
from podembed.orchestrator.api.intervals import check_steps, in_steps, known_steps
from podembed.orchestrator.api.keep_policies import KeepBest, KeepEvery, KeepPolicy
from podembed.orchestrator.api.metrics_config import MetricsConfig
from podembed.orchestrator.api.save_policies import AfterEvaluation, EverySeconds, EverySteps, OnBest, Order, SavePolicy
from podembed.orchestrator.api.scaling import ScalingConfig
from podembed.workers.declared_types import check_plain_fields, shown
from podembed.workers.faults.plan import FaultPlan
from podembed.workers.storage.store import place

__all__ = [
    "DEFAULT_METRIC",
    "DEFAULT_STEP_TIMEOUT_S",
    "CheckpointConfig",
    "ConfigurationError",
    "FailureConfig",
    "MetricsConfig",
    "RunConfig",
    "ScalingConfig",
    "WarmStart",
]

DEFAULT_METRIC = "auc"
DEFAULT_STEP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to commit and what to keep. The last step, and a stop by a signal, are committed in any case.

    Attributes:
      every_steps, every_seconds: commit when so many have passed since the last commit; both, where both are given.
        With neither of them nor `on_best`, commit after evaluations. Steps may be epochs as text, such as `"1epoch"` or
        `"0.5epoch"`.
      seconds_apart: leave a commit of `every_steps` out until so many seconds have passed since the one before was
        done, so that a short run does not wait for its commits.
      on_best: commit after an evaluation that is better than that of every commit so far.
      metric: what "best" means here: `auc`, `log_loss`, `loss` (the job's own, see `Evaluation`) or the name of one of
        `JobConfig.metrics`. None stands for `auc`, and for `loss` where the job declares a loss.
      metric_order: `max` or `min`, whether its highest or its lowest value is the best. None takes `lower_is_better` of
        the job's metric. Without that the name decides: one that ends with `loss` means the lowest.
      num_to_keep: newest commits kept, at least 2; None keeps all.
      keep_every_steps: also keep the first commit at or after each multiple of so many steps, or epochs as text.
      keep_best: also keep so many commits with the best metric. Only commits made right after an evaluation have one.
      read_back: read every byte back and compare it before a commit is published, for storage that is not trusted to
        keep what it accepted. Otherwise the sizes of all files are compared.
      full_every: one commit in so many holds all rows. Those between hold only the rows that changed since the commit
        before. They need the files of all commits back to the last full one, which are kept as long as they are. 1
        makes all commits full.
    """

    every_steps: int | str | None = None
    every_seconds: float | None = None
    seconds_apart: float = 0.0
    on_best: bool = False
    metric: str | None = None
    metric_order: Order | None = None
    num_to_keep: int | None = 3
    keep_every_steps: int | str | None = None
    keep_best: int = 0
    read_back: bool = False
    full_every: int = 1

    def __post_init__(self) -> None:
        check_plain_fields(self, ConfigurationError)
        check_steps(self, "every_steps", ConfigurationError)
        check_steps(self, "keep_every_steps", ConfigurationError)
        if self.every_seconds is not None and not 0 < self.every_seconds < math.inf:
            raise ConfigurationError(f"Found every_seconds={self.every_seconds}. Expected seconds above 0, or None.")
        if not 0 <= self.seconds_apart < math.inf or (self.seconds_apart and self.every_steps is None):
            raise ConfigurationError(
                f"Found seconds_apart={self.seconds_apart} with every_steps={self.every_steps}. Expected seconds of at "
                "least 0, and steps between commits. Give both, or leave seconds_apart out."
            )
        if self.metric is not None and not (isinstance(self.metric, str) and self.metric):
            raise ConfigurationError(
                f"Found metric={self.metric!r}. Expected the name of a metric, such as 'auc' or 'loss'. Choose one, or "
                "None."
            )
        if self.metric_order not in (None, *get_args(Order)):
            raise ConfigurationError(
                f"Found metric_order={self.metric_order!r}. Expected one of {', '.join(get_args(Order))}, or None. "
                "Choose one of them."
            )
        if self.keep_best < 0:
            raise ConfigurationError(f"Found keep_best={self.keep_best}. Expected at least 0.")
        if self.num_to_keep is not None and self.num_to_keep < 2:
            raise ConfigurationError(
                f"Found num_to_keep={self.num_to_keep}. Expected at least 2, so that a damaged commit has an ancestor, "
                "or None."
            )
        if self.full_every < 1:
            raise ConfigurationError(f"Found full_every={self.full_every}. Expected at least 1, which makes all full.")

    @property
    def save_policies(self) -> tuple[SavePolicy, ...]:
        """When to commit on the way. Steps must be known, see `in_steps`."""
        policies: list[SavePolicy] = []
        if (every_steps := known_steps("every_steps", self.every_steps)) is not None:
            policies.append(EverySteps(every_steps, self.seconds_apart))
        if self.every_seconds is not None:
            policies.append(EverySeconds(self.every_seconds))
        if self.on_best:
            policies.append(OnBest(self.metric or DEFAULT_METRIC, self.metric_order))
        return tuple(policies) or (AfterEvaluation(),)

    @property
    def keep_policies(self) -> tuple[KeepPolicy, ...]:
        """What to keep besides the newest; of no effect where all are kept. Steps must be known, see `in_steps`."""
        policies: list[KeepPolicy] = []
        if (keep_every := known_steps("keep_every_steps", self.keep_every_steps)) is not None:
            policies.append(KeepEvery(keep_every))
        if self.keep_best:
            policies.append(KeepBest(self.keep_best, self.metric or DEFAULT_METRIC, self.metric_order))
        return tuple(policies)

    @property
    def uses_metric(self) -> bool:
        """Whether anything hangs on which commit is the best."""
        return self.on_best or self.keep_best > 0

    def in_steps(self, steps_per_epoch: int) -> CheckpointConfig:
        """The same with steps in place of epochs.

        Raises:
          ConfigurationError: epochs that are no whole number of steps.
        """
        return _in_steps(self, ("every_steps", "keep_every_steps"), steps_per_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """What a run bears.

    Attributes:
      max_failures: host faults in a row without a new commit before the run stops. Announced losses of machines are not
        counted.
      max_user_errors: exceptions of the job in the middle of training after which it is tried again, in one call. The
        same one at the same step twice stops the run in any case.
      wait_for_hosts_s: seconds that the run waits for hosts when there are fewer than `ScalingConfig.num_hosts` asks
        for.
      quarantine_after: faults on one machine within `quarantine_period_s` after which it is not used for a while.
      quarantine_s: how long at first; each further fault doubles it, up to `quarantine_period_s`.
      step_timeout_s: seconds without any finished step after which the group is taken for hung. None takes ten times
        the median step, at least 30 s. Before the first step, and while hosts wait for storage or devices compile, it
        is 120 s.
      start_timeout_s: seconds for processes to start, join, restore and compile.
      lease_timeout_s: seconds without calls and heartbeats of the driver after which worker processes end themselves.
        The driver's heartbeat is written every 5 s.
      max_failed_saves: after so many saves in a row that the storage failed, training waits for the next one. Until
        then it continues without. A fault leads back to the last commit all the same. 0 ends the run with the first.
      storage_timeout_s: the limit of that wait, of the tries to commit the last step, and, after a fault, of each
        request for the next generation. Then the run ends with an error. 0 ends it where it would have to wait.
      undo_share: the share of the tables' bytes that undo may take. Hosts that survive a fault return to the last
        commit in memory, and read only what found no room in it. 0 keeps none: then they read all their rows.
      standby_after_s: after so many seconds of training, the driver starts processes that wait to take the place of
        lost ones. None starts none.
    """

    max_failures: int = 3
    max_user_errors: int = 1
    wait_for_hosts_s: float = 600.0
    quarantine_after: int = 2
    quarantine_s: float = 30.0
    quarantine_period_s: float = 3600.0
    step_timeout_s: float | None = None
    start_timeout_s: float = 300.0
    lease_timeout_s: float = 30.0
    max_failed_saves: int = 3
    storage_timeout_s: float = 1800.0
    undo_share: float = 0.1
    standby_after_s: float | None = 30.0

    def __post_init__(self) -> None:
        check_plain_fields(self, ConfigurationError)
        for name, least in (
            ("max_failures", 0),
            ("max_user_errors", 0),
            ("wait_for_hosts_s", 0),
            ("quarantine_after", 1),
        ):
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"Found {name}={getattr(self, name)}. Expected at least {least}.")
        if not 0 < self.quarantine_s <= self.quarantine_period_s:
            raise ConfigurationError(
                f"Found quarantine_s={self.quarantine_s} and quarantine_period_s={self.quarantine_period_s}. "
                f"Expected seconds above 0, and a period that is no shorter."
            )
        if not self.lease_timeout_s >= 1:
            raise ConfigurationError(
                f"Found lease_timeout_s={self.lease_timeout_s}. Expected at least 1; 30 or more outside of trials."
            )
        if self.worker_step_timeout_s <= 0 or self.start_timeout_s < 1:
            raise ConfigurationError(
                f"Found step_timeout_s={self.step_timeout_s} and start_timeout_s={self.start_timeout_s}. "
                f"Expected seconds above 0, and at least 1 to start."
            )
        if self.max_failed_saves < 0 or not 0 <= self.storage_timeout_s < math.inf:
            raise ConfigurationError(
                f"Found max_failed_saves={self.max_failed_saves} and storage_timeout_s={self.storage_timeout_s}. "
                "Expected at least 0, and finite seconds of at least 0."
            )
        if not 0 <= self.undo_share <= 4:
            raise ConfigurationError(f"Found undo_share={self.undo_share}. Expected a share from 0, such as 0.1.")
        if self.standby_after_s is not None and not 0 <= self.standby_after_s < math.inf:
            raise ConfigurationError(f"Found standby_after_s={self.standby_after_s}. Expected seconds from 0, or None.")

    @property
    def worker_step_timeout_s(self) -> float:
        """How long a worker waits for another one within a step before it gives up by itself; the driver does so
        earlier.
        """
        return DEFAULT_STEP_TIMEOUT_S if self.step_timeout_s is None else self.step_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The beginning of a new run, instead of initial values. Step, data and schedules begin anew; only state is taken
    over.

    Attributes:
      source: `RUN`, for the newest commit at that time, or `RUN@COMMIT`.
      rules: what is meant by each difference between the commit and the job, such as `users=rename=members`,
        `ads=reinit`, `old=drop`, `items=rows`, `@dense=params`, `@accept=users`; see `orchestrator.run.warm_start`.
    """

    source: str
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.source, str | os.PathLike):
            object.__setattr__(self, "source", place(self.source))
        if isinstance(self.rules, str):
            raise ConfigurationError(
                f"Found rules={self.rules!r} in WarmStart. Expected a tuple of rules. Write rules=({self.rules!r},)."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Name and place of a run, and its policies.

    Attributes:
      name: folder of the run below `storage_path`; None makes one from the job's name and the time.
      storage_path: local folder or fsspec URL that every host reaches.
      eval_every_steps: steps between evaluations, or epochs as text, such as `"1epoch"`; None evaluates at the end
        only.
      evaluate_at_end: whether the finished model is evaluated, where the data declares evaluation files.
      max_steps: stop after this many steps of the whole run, or epochs as text; None trains all epochs.
      take_over: fence another driver that still holds this run.
      warm_start: another run's commit that a new run begins from; None begins with initial values.
      single_writer: accept a storage that cannot create files exclusively, where nothing stops a second driver.
      accept_input_change: go on with a run although its data files are not those that it began with, or the job makes
        other rows of their columns.
      fault_plan: faults to be injected, for `podembed chaos` and tests.
    """

    name: str | None = None
    storage_path: str = ".runs"
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    metrics_config: MetricsConfig = field(default_factory=MetricsConfig)
    eval_every_steps: int | str | None = None
    evaluate_at_end: bool = True
    max_steps: int | str | None = None
    take_over: bool = False
    warm_start: WarmStart | None = None
    single_writer: bool = False
    accept_input_change: bool = False
    fault_plan: FaultPlan | None = None

    def __post_init__(self) -> None:
        if isinstance(self.storage_path, str | os.PathLike):
            object.__setattr__(self, "storage_path", place(self.storage_path))
        check_plain_fields(self, ConfigurationError)
        if not self.storage_path:
            raise ConfigurationError(
                "Found storage_path='' in RunConfig, as an unset variable gives it. Expected a folder or a URL. Write "
                "storage_path='.' for the current folder."
            )
        kinds = {
            "checkpoint_config": CheckpointConfig,
            "failure_config": FailureConfig,
            "metrics_config": MetricsConfig,
            "warm_start": WarmStart,
            "fault_plan": FaultPlan,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name.endswith("config")):
                raise ConfigurationError(
                    f"Found {name}={shown(value)} in RunConfig. Expected a {kind.__name__}. Write "
                    f"{name}={kind.__name__}(...)."
                )
        parts = (self.name or "").split("/")
        is_folder = not any(part in ("", ".", "..") or not part.isprintable() for part in parts)
        if self.name is not None and not is_folder:
            raise ConfigurationError(
                f"Found name={self.name!r}. Expected the name of a folder below storage_path, such as 'clicks' or "
                "'team/clicks'. Put what lies above it into storage_path."
            )
        check_steps(self, "eval_every_steps", ConfigurationError)
        check_steps(self, "max_steps", ConfigurationError)

    def in_steps(self, steps_per_epoch: int) -> RunConfig:
        """The same with steps in place of epochs, also in `checkpoint_config`.

        Raises:
          ConfigurationError: epochs that are no whole number of steps.
        """
        known = _in_steps(self, ("eval_every_steps", "max_steps"), steps_per_epoch)
        return replace(known, checkpoint_config=self.checkpoint_config.in_steps(steps_per_epoch))

    def last_step(self, total_steps: int) -> int:
        """The step after which a run of so many steps stops. Steps must be known, see `in_steps`."""
        max_steps = known_steps("max_steps", self.max_steps)
        return total_steps if max_steps is None else min(total_steps, max_steps)


Declared = TypeVar("Declared", CheckpointConfig, RunConfig)


def _in_steps(declared: Declared, names: tuple[str, ...], steps_per_epoch: int) -> Declared:
    found = {name: in_steps(name, getattr(declared, name), steps_per_epoch, ConfigurationError) for name in names}
    return replace(declared, **found)
