"""`Shared`: what the generations of one driver have in common. A generation comes and goes; this stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.signals import StopSignals
from podembed.orchestrator.commit.storage_wait import StorageWait, at_once
from podembed.orchestrator.decisions.host_watch import Cluster, HostWatch
from podembed.orchestrator.driver.journal import Journal
from podembed.orchestrator.driver.publication import Publisher
from podembed.orchestrator.driver.saves import Saves
from podembed.orchestrator.driver.step_trace import StepTrace
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.reporter import Reporter
from podembed.orchestrator.group.survivors import Groups
from podembed.orchestrator.group.worker_group import Backend
from podembed.orchestrator.planning.recorded import RecordedPlans
from podembed.orchestrator.run.claims import Claims
from podembed.orchestrator.run.run import OpenRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """See the module. Used by the driver's thread; of `journal` the publishing thread is handed two parts.

    Attributes:
      reporter: reporter that is told of activities; it hears of events through `emit`.
      resources: of each host, as the user requested them.
      platform: that its devices must be of, as JAX calls it; empty for any.
      publisher: makes what publishes commits beside the driver's thread, one for each generation.
      storage_wait: asks a storage that is away again, while nothing trains.
    """

    run: OpenRun
    claims: Claims
    config: RunConfig
    resources: Mapping[str, float] | None
    platform: str
    threads: int
    scaling: ScalingConfig
    reporter: Reporter
    emit: Emit
    stop: StopSignals
    clock: Clock
    publisher: Callable[[], Publisher]
    groups: Groups
    watch: HostWatch
    saves: Saves
    journal: Journal
    trace: StepTrace
    storage_wait: StorageWait
    plans: RecordedPlans

    @staticmethod
    def of(
        run: OpenRun,
        *,
        scaling: ScalingConfig,
        config: RunConfig,
        backend: Backend,
        cluster: Cluster | None,
        reporter: Reporter,
        emit: Emit,
        stop: StopSignals,
        clock: Clock,
        publisher: Callable[[], Publisher],
        trace: StepTrace,
    ) -> Shared:
        """All that the generations need, of what a driver is given; the arguments are those of `Driver`."""
        limits, plans = config.failure_config, RecordedPlans(run, scaling, emit=emit)
        groups = Groups(backend, standby_after_s=limits.standby_after_s, emit=emit, clock=clock)
        return Shared(
            run=run,
            claims=Claims(run, config.checkpoint_config, emit=emit, unix_s=clock.wall_s),
            config=config,
            resources=None if scaling.platform == "cpu" else scaling.reserved,
            platform=(scaling.jax_platforms or "").partition(",")[0],
            threads=scaling.threads_per_host or 1,
            scaling=scaling,
            reporter=reporter,
            emit=emit,
            stop=stop,
            clock=clock,
            publisher=publisher,
            groups=groups,
            watch=HostWatch(
                cluster, scaling=scaling, limits=limits, emit=emit, describe_plan=plans.describe, clock=clock
            ),
            saves=Saves.of(
                config,
                all_steps=run.total_steps,
                has_evaluation=run.eval_index is not None,
                clock=clock,
                stops_early=run.job.early_stopping is not None,
            ),
            journal=Journal(run, config.checkpoint_config, emit=emit, clock=clock),
            trace=trace,
            storage_wait=StorageWait(
                limits.storage_timeout_s, stop=stop, emit=emit, clock=clock, meanwhile=groups.ping_at_times
            ),
            plans=plans,
        )

    @property
    def patiently(self) -> Callable[[Callable[[], Any]], Any]:
        """How the storage is asked while nothing trains. If the storage is away when the program starts, that is an
        error at once; a run that is under way waits for it.
        """
        return self.storage_wait if self.claims.generation else at_once

    @property
    def is_stopping(self) -> bool:
        """Whether the run is to end after a commit: on request, or since its evaluations no longer get better."""
        return self.stop.reason is not None or self.journal.early_stop.is_due

    @property
    def evaluates_at_end(self) -> bool:
        """Whether the driver's last act is an evaluation, if it gets to the last step."""
        return not self.journal.early_stop.is_due and self.config.evaluate_at_end and self.run.eval_index is not None
