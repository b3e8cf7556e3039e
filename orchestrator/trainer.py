"""`Trainer`: what a Python program calls. Opens the run, the cluster and the driver, and closes them in every case."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial

from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.policy_checks import check_hosts, check_job, check_policies, check_storage, with_metric
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.api.signals import StoppedAtStart
from podembed.orchestrator.cluster.joining import joined
from podembed.orchestrator.driver.console import ConsoleReporter
from podembed.orchestrator.driver.driver import Driver
from podembed.orchestrator.driver.event_log import injecting
from podembed.orchestrator.events.reporter import Reporter, tell
from podembed.orchestrator.events.run import FilesInOrder, NothingLeft, RunOpened
from podembed.orchestrator.planning.of_run import with_prediction
from podembed.orchestrator.run.finished import finished, untrained
from podembed.orchestrator.run.opening import create_run
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.job.reference import AnyJob, JobReference


class Trainer:
    """Trains a job on a number of hosts.

    Args:
      job: the job itself, or the name of the function that returns it. A run of the latter can be resumed from its
        folder alone.
      scaling_config: hosts.
      run_config: name, place and policies of the run.
      reporter: shows progress; the console by default.
    """

    def __init__(
        self,
        job: AnyJob,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        check_job(job)
        self._job = job
        self._scaling = scaling_config or ScalingConfig()
        self._config = run_config or RunConfig()
        self._reporter = reporter or ConsoleReporter()

    def fit(self) -> Result:
        """Creates the run, or goes on with it if `RunConfig.name` names one that exists, and trains to its end.

        Returns:
          How it ended. A call that a signal stops before its first step returns too: `Result.commit` is then the newest
          commit, or None where there is none yet. The same program goes on with the run.

        Raises:
          JobFailed, CrashLoop, TooFewHosts, Fenced, RunIsHeld, ConfigurationError and the errors of data and storage.
        """
        reference = self._job if isinstance(self._job, JobReference) else None
        job = self._job.resolve() if isinstance(self._job, JobReference) else self._job
        check_hosts(job, self._scaling)
        check_policies(job, self._config)
        check_storage(self._config.storage_path, self._scaling)
        name = self._config.name or f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = create_run(
            f"{self._config.storage_path.rstrip('/')}/{name}",
            job,
            reference,
            warm_start=self._config.warm_start,
            single_writer=self._config.single_writer,
            accept_input_change=self._config.accept_input_change,
            take_over=self._config.take_over,
        )
        return fit(run, scaling=self._scaling, config=replace(self._config, name=name), reporter=self._reporter)


def fit(run: OpenRun, *, scaling: ScalingConfig, config: RunConfig, reporter: Reporter) -> Result:
    """Drives an opened run to its end, on a cluster that is joined or started for it.

    Raises:
      As `Trainer.fit`.
    """
    check_hosts(run.job, scaling)
    check_policies(run.job, config)
    config = config.in_steps(run.input_plan.steps_per_epoch)
    config = replace(config, checkpoint_config=with_metric(run.job, config.checkpoint_config))
    check_storage(run.url, scaling)
    emit = partial(tell, reporter)
    head = run.newest_commit()
    if (result := finished(run, config, head)) is not None:
        emit(NothingLeft(url=run.url, step=result.step, commit=result.commit))
        return result
    emit(RunOpened(url=run.url))
    if run.job.data.order == "files":
        emit(FilesInOrder(description=run.train_index.order_of_files))

    def patience_s() -> float:
        # A run that has begun has lost its cluster; for a new one, the address is wrong.
        return config.failure_config.wait_for_hosts_s if run.has_begun else 0.0

    with contextlib.ExitStack() as stack:
        if config.fault_plan is not None:
            run, emit = stack.enter_context(injecting(config.fault_plan, run, emit))
        try:
            place = stack.enter_context(joined(scaling, patience_s=patience_s, activity=reporter.activity, emit=emit))
            stack.callback(reporter.close)
            driver = Driver(
                run,
                scaling=scaling,
                config=config,
                backend=place.backend,
                cluster=place.cluster,
                reporter=reporter,
                emit=emit,
                stop=place.stop,
            )
            result = driver.run()
        except StoppedAtStart as stopped:
            # Before there was a cluster, or a lease: no other process has to hear of it.
            reporter.close()
            return untrained(run, config, head, stopped_by=stopped.reason)
    # The hosts are gone by now, so what has to be measured for it has the machine for itself.
    return with_prediction(run, result, scaling, emit=emit)
