"""The driver: one loop over generations, until one of them ends well. Read this file first.

The driver names steps, not data, and holds no state that matters: what counts is what the run's folder says was
committed. A generation (`generation`) is one set of worker processes: it plans, starts, trains in windows, commits and
evaluates. A host fault ends it, and the next one begins from the last commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import Result, RunConfig, ScalingConfig, check_policies
from podembed.orchestrator.api.errors import JobFailed, WorkerFailure
from podembed.orchestrator.api.signals import StoppedAtStart, StopSignals
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.decisions.host_watch import Cluster
from podembed.orchestrator.driver.console import Reporter
from podembed.orchestrator.driver.generation import Finished, Generation, Placement
from podembed.orchestrator.driver.publication import Publisher, PublishingThread
from podembed.orchestrator.driver.recovery import Fault
from podembed.orchestrator.driver.shared import Shared
from podembed.orchestrator.group.worker_group import Backend
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.liveness.progress import Laps
from podembed.workers.storage.errors import StorageError


class Driver:
    """Runs one job to its end, through faults.

    Args:
      run: the opened run; its folder, record and job.
      scaling: hosts of this call; may differ from those of earlier ones.
      config: policies.
      backend: how worker processes are started.
      cluster: the machines that they run on; None where there is no cluster.
      reporter: who is told.
      stop: asked between windows whether to leave after a commit.
      clock, publisher: time, and what publishes beside this thread; replaced in tests.
    """

    def __init__(
        self,
        run: OpenRun,
        *,
        scaling: ScalingConfig,
        config: RunConfig,
        backend: Backend,
        cluster: Cluster | None = None,
        reporter: Reporter,
        stop: StopSignals,
        clock: Clock = SYSTEM_CLOCK,
        publisher: Callable[[], Publisher] = PublishingThread,
    ) -> None:
        check_policies(run.job, config)
        self.shared = Shared.of(
            run,
            scaling=scaling,
            config=config,
            backend=backend,
            cluster=cluster,
            reporter=reporter,
            stop=stop,
            clock=clock,
            publisher=publisher,
        )
        self._lease: Lease | None = None

    def run(self) -> Result:
        """Trains until all steps are done, or until a signal asks to stop.

        Raises:
          JobFailed: the job, its data or its model raised.
          CrashLoop: host faults came one after another without a commit in between.
          TooFewHosts: there were too few hosts for too long.
          Fenced: another driver took the run.
        """
        shared = self.shared
        try:
            return self._result(self._generations())
        except StoppedAtStart:
            if self._lease is None:
                raise
            step = shared.run.head_step(self._lease)
            shared.journal.history.cut(step)
            return self._result(step)
        finally:
            shared.groups.stop()
            # However the run ended: who mends what stopped it should not have to wait for the heartbeat to grow old.
            if self._lease is not None:
                with contextlib.suppress(StorageError, OSError):
                    shared.stop.ending(self._lease.release)

    def _generations(self) -> int:
        """Generation after generation until one ends well. Returns the step that it ended at, with a commit."""
        fault: Fault | None = None
        placement: Placement | None = None
        while True:
            generation = self._next(placement)
            try:
                ending = generation.run(fault)
            except JobFailed:
                # What was frozen before is good, and the workers live.
                generation.finish_commits()
                raise
            except WorkerFailure as failure:
                fault = generation.lost(failure, fault)
            else:
                if isinstance(ending, Finished):
                    return ending.step
                fault = None
                generation.give_way(ending)
            finally:
                generation.close()
            placement = generation.placement

    def _next(self, placement: Placement | None) -> Generation:
        """Claims the lease of the next generation, which begins from the last commit.

        Args:
          placement: who owned what in the generation before; some of its hosts may live on.
        """
        shared, run = self.shared, self.shared.run
        laps = Laps(shared.clock.monotonic_s)
        patiently = shared.patiently
        lease = self._lease = run.acquire(patiently)
        base = patiently(lambda: run.load_base(lease))
        laps.end("lease")
        generation = Generation(shared, lease, base, before=placement, laps=laps)
        shared.journal.begin(generation.base_step)
        return generation

    def _result(self, step: int) -> Result:
        shared, history = self.shared, self.shared.journal.history
        total_steps = shared.schedule.total_steps
        return Result(
            path=shared.run.url,
            step=step,
            total_steps=total_steps,
            num_samples=history.num_samples,
            trained_s=history.trained_s,
            samples_per_s=history.num_samples / history.trained_s if history.trained_s > 0 else 0.0,
            median_samples_per_s=history.median_samples_per_s,
            num_windows=len(history.windows),
            losses=dict(history.losses),
            evaluations=tuple(history.evaluations),
            recoveries=tuple(history.recoveries),
            phase_s=dict(history.phase_s),
            commit=self._lease.head if self._lease else None,
            stopped_by=shared.stop.reason if step < total_steps else None,
            staleness=shared.run.job.staleness,
            changes=tuple(shared.watch.changes),
            failed_saves=history.failed_saves,
        )
