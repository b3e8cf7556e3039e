"""`Trainer`: what a Python program calls."""

from __future__ import annotations

import time
from dataclasses import replace

from podembed.jobs.fitting import fit
from podembed.jobs.reporters.console import ConsoleReporter
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.policy_checks import check_hosts, check_job, check_policies, check_storage
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.reporter import Reporter
from podembed.orchestrator.run.opening import create_run
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
