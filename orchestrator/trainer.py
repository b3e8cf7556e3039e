"""`Trainer`: what a Python program calls. Opens the run, the cluster and the driver, and closes them in every case."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial

from podembed.orchestrator.api.config import (
    ConfigurationError,
    Result,
    RunConfig,
    ScalingConfig,
    check_policies,
    with_metric,
)
from podembed.orchestrator.api.signals import StoppedAtStart, StopSignals
from podembed.orchestrator.cluster.cluster_wait import await_cluster
from podembed.orchestrator.cluster.connection import connected
from podembed.orchestrator.cluster.in_process import InProcessBackend
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.cluster.ray_nodes import RayNodes
from podembed.orchestrator.commit.lease import read_claims
from podembed.orchestrator.driver.console import ConsoleReporter, Reporter
from podembed.orchestrator.driver.driver import Driver
from podembed.orchestrator.driver.event_log import EventLog
from podembed.orchestrator.run.finished import finished
from podembed.orchestrator.run.run import OpenRun, create_run
from podembed.workers.declared_types import shown
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.faults.storage import with_faults
from podembed.workers.input.index import describe_order
from podembed.workers.job.job import JobConfig, JobReference


class Trainer:
    """Trains a job on a number of hosts.

    Args:
      job: the job itself, or the name of the function that returns it. A run of the latter can be resumed from its
        folder alone.
      scaling_config: hosts.
      run_config: name, place and policies of the run.
      reporter: who is told about progress; the console by default.
    """

    def __init__(
        self,
        job: JobConfig | JobReference,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        if not isinstance(job, JobConfig | JobReference):
            raise ConfigurationError(
                f"Found job={shown(job)} for Trainer. Expected a JobConfig, or a JobReference to the function that "
                "returns one. Call the function "
                "that makes the job, and pass what it returns."
            )
        self._job = job
        self._scaling = scaling_config or ScalingConfig()
        self._config = run_config or RunConfig()
        self._reporter = reporter or ConsoleReporter()

    def fit(self) -> Result:
        """Creates the run, or goes on with it if `RunConfig.name` names one that exists, and trains to its end.

        Raises:
          JobFailed, CrashLoop, TooFewHosts, Fenced, RunIsHeld, ConfigurationError and the errors of data and storage.
        """
        reference = self._job if isinstance(self._job, JobReference) else None
        job = self._job.resolve() if isinstance(self._job, JobReference) else self._job
        check_hosts(job, self._scaling)
        check_policies(job, self._config)
        _check_storage(self._config.storage_path, self._scaling)
        name = self._config.name or f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = create_run(
            f"{self._config.storage_path.rstrip('/')}/{name}",
            job,
            reference,
            warm_start=self._config.warm_start,
            single_writer=self._config.single_writer,
            accept_input_change=self._config.accept_input_change,
        )
        run.take_over = self._config.take_over
        return fit(run, scaling=self._scaling, config=replace(self._config, name=name), reporter=self._reporter)


def fit(run: OpenRun, *, scaling: ScalingConfig, config: RunConfig, reporter: Reporter) -> Result:
    """Drives an opened run to its end, on a cluster that is joined or started for it.

    Raises:
      As `Trainer.fit`; StoppedAtStart: a signal came before there was a cluster.
    """
    check_hosts(run.job, scaling)
    check_policies(run.job, config)
    config = config.in_steps(run.input_plan.steps_per_epoch)
    config = replace(config, checkpoint_config=with_metric(run.job, config.checkpoint_config))
    _check_storage(run.url, scaling)
    run.policies = config.checkpoint_config
    if (result := finished(run, config)) is not None:
        reporter.notice(f"nothing is left to do in {run.url}: step {result.step} is committed as {result.commit}")
        return result
    reporter.notice(f"run folder {run.url}")
    if run.job.data.order == "files":
        reporter.notice(describe_order(run.train_index.files))
    run.notice = reporter.notice
    with contextlib.ExitStack() as stack:
        if config.fault_plan is not None:
            faults = FaultPoints.of(config.fault_plan, "driver")
            run.store = with_faults(run.store, faults)
            reporter = stack.enter_context(EventLog(reporter, config.fault_plan.folder, faults))
        stop = stack.enter_context(StopSignals())
        stack.callback(reporter.close)
        cluster = None
        if scaling.in_process:
            backend = InProcessBackend()
        else:
            # A run that has begun has lost its cluster; another one was told a wrong address.
            patience_s = config.failure_config.wait_for_hosts_s if read_claims(run.store) else 0.0
            wait = partial(await_cluster, timeout_s=patience_s, stop=stop, notice=reporter.notice)
            reporter.activity("starting Ray, or joining its cluster")
            try:
                joined = connected(scaling.least_hosts, wait, on_wait=partial(_go_on, stop), notice=reporter.notice)
                connection = stack.enter_context(joined)
            except SystemExit as left:
                # While it connects, Ray installs a handler of its own for SIGTERM, which leaves so.
                raise StoppedAtStart from left
            stop.claim()
            backend = RayBackend(scaling, reporter.notice, lost=connection.lost, answers=connection.answers)
            cluster = RayNodes(backend, scaling, connection=connection, notice=reporter.notice)
        driver = Driver(
            run, scaling=scaling, config=config, backend=backend, cluster=cluster, reporter=reporter, stop=stop
        )
        return driver.run()


def _go_on(stop: StopSignals) -> None:
    if stop.reason is not None:
        raise StoppedAtStart


def check_hosts(job: JobConfig, scaling: ScalingConfig) -> None:
    """Refuses more hosts than there are lanes to read.

    Raises:
      ConfigurationError: a host would have nothing to do.
    """
    if scaling.most_hosts > job.num_lanes:
        found = f"up to {scaling.most_hosts}" if scaling.is_range else scaling.most_hosts
        raise ConfigurationError(
            f"Found {found} hosts for the {job.num_lanes} lanes of job '{job.name}'. Expected at most one host a lane. "
            f"Use fewer hosts, or begin a new run with JobConfig(num_lanes=...) of at least {scaling.most_hosts}."
        )


def _check_storage(url: str, scaling: ScalingConfig) -> None:
    """Refuses a run in memory for hosts that are other processes: each would see files of its own.

    Raises:
      ConfigurationError: the storage cannot be shared.
    """
    if url.startswith("memory://") and not scaling.in_process:
        raise ConfigurationError(
            f"Found {url} for hosts in processes of their own. Expected storage that all of them reach. "
            f"Use a folder or an object store, or one host with in_process=True (--in-process)."
        )
