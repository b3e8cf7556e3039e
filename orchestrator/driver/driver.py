"""The driver: one loop over generations, until one of them ends well. Read this file first.

The driver names steps, not data, and holds no state that matters: what counts is what the run's folder says was
committed. A generation (`generation`) is one set of worker processes: it plans, starts, trains in windows, commits and
evaluates. A host fault ends it, and the next one begins from the last commit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.api.run_errors import JobFailed, WorkerFailure
from podembed.orchestrator.api.signals import StoppedAtStart, StopSignals
from podembed.orchestrator.decisions.host_watch import Cluster
from podembed.orchestrator.driver.generation import Finished, Generation, Placement
from podembed.orchestrator.driver.publication import Publisher, PublishingThread
from podembed.orchestrator.driver.recovery import LostGeneration
from podembed.orchestrator.driver.shared import Shared
from podembed.orchestrator.driver.step_trace import StepTrace
from podembed.orchestrator.events.callbacks import CallbackThread
from podembed.orchestrator.events.commits import StepsGivenUp
from podembed.orchestrator.events.reporter import Reporter, tell
from podembed.orchestrator.group.worker_group import Backend
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.liveness.progress import Stopwatch


class Driver:
    """Runs one job to its end, through faults.

    Args:
      run: the opened run; its folder, record and job.
      scaling: hosts of this call; may differ from those of earlier ones.
      config: policies.
      backend: how worker processes are started.
      cluster: the machines that they run on; None where there is no cluster.
      reporter: shows people what happens.
      emit: callback that takes events; the reporter by default.
      stop: asked between windows whether to leave after a commit.
      clock, publisher: time, and what publishes beside this thread; replaced in tests.
      trace: trace of some steps; None for no trace.
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
        emit: Callable[[Any], None] | None = None,
        stop: StopSignals,
        clock: Clock = SYSTEM_CLOCK,
        publisher: Callable[[], Publisher] = PublishingThread,
        trace: StepTrace | None = None,
    ) -> None:
        self._callbacks = CallbackThread(run.job.callbacks, emit=emit or partial(tell, reporter))
        self.shared = Shared.of(
            run,
            scaling=scaling,
            config=config,
            backend=backend,
            cluster=cluster,
            reporter=reporter,
            emit=self._callbacks.event,
            stop=stop,
            clock=clock,
            publisher=publisher,
            trace=trace or StepTrace(),
        )

    def run(self) -> Result:
        """Trains until all steps are done, or until a signal asks to stop.

        Raises:
          JobFailed: the job, its data or its model raised.
          CrashLoop: host faults came one after another without a commit in between.
          TooFewHosts: there were too few hosts for too long.
          Fenced: another driver took the run.
          StoppedAtStart: it was asked to stop before it held the run.
        """
        reference, request = self.shared.run.reference, self.shared.stop.request
        with self._callbacks as callbacks:
            callbacks.begin(self.shared.run.url, dict(reference.arguments) if reference else {}, request)
            return callbacks.end(self._ended())

    def _ended(self) -> Result:
        shared = self.shared
        try:
            return self._result(self._generations())
        except StoppedAtStart as stopped:
            if shared.claims.lease is None:
                raise
            step = shared.claims.lease.head_step
            shared.journal.history.cut(step)
            # A run that has all its steps starts for nothing else.
            shared.journal.owed_step = step
            # Where a library took the signal, the request is known from here alone.
            shared.stop.reason = shared.stop.reason or stopped.reason
            return self._result(step)
        finally:
            shared.trace.close()
            shared.groups.stop()
            # However the run ended, a user who mends the cause should not have to wait for the heartbeat to grow old.
            if shared.claims.lease is not None:
                shared.stop.ending(shared.claims.lease.release_if_possible)

    def _generations(self) -> int:
        """Runs generation after generation until one ends well. Returns the step that it ended at, with a commit."""
        fault: LostGeneration | None = None
        placement: Placement | None = None
        while True:
            try:
                generation = self._next(placement)
            except StoppedAtStart:
                self._tell_given_up(fault)
                raise
            try:
                ending = generation.run(fault)
            except StoppedAtStart:
                self._tell_given_up(fault)
                raise
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

    def _tell_given_up(self, fault: LostGeneration | None) -> None:
        """Reports what a stop in the middle of a recovery costs: the steps that would have been done again."""
        lease = self.shared.claims.lease
        if fault is not None and lease is not None and fault.reached_step > lease.head_step:
            self.shared.emit(
                StepsGivenUp(commit=lease.head, base_step=lease.head_step, reached_step=fault.reached_step)
            )

    def _next(self, placement: Placement | None) -> Generation:
        """Claims the lease of the next generation, which begins from the last commit.

        Args:
          placement: who owned what in the generation before; some of its hosts may live on.
        """
        shared, claims = self.shared, self.shared.claims
        stopwatch = Stopwatch(shared.clock.monotonic_s)
        patiently = shared.patiently
        lease = claims.acquire(patiently)
        base = patiently(lambda: claims.load_base(lease))
        stopwatch.end("lease")
        generation = Generation(shared, lease, base, before=placement, stopwatch=stopwatch)
        shared.journal.begin(generation.base_step, generation=lease.generation)
        return generation

    def _result(self, step: int) -> Result:
        shared, lease = self.shared, self.shared.claims.lease
        return shared.journal.result(
            step=step,
            total_steps=shared.saves.schedule.total_steps,
            commit=lease.head if lease else None,
            stopped_by=shared.stop.reason,
            changes=shared.watch.changes,
        )
