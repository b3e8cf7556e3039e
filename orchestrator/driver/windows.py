"""`DriverWindows`: a generation's windows of steps and evaluations, and what they find for the history and the user."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from podembed.orchestrator.api.run_errors import JobFailed
from podembed.orchestrator.api.save_policies import declared_orders
from podembed.orchestrator.decisions.failure import window_end, window_target_s
from podembed.orchestrator.decisions.window_health import WindowHealth
from podembed.orchestrator.driver.background_commit import BackgroundCommits
from podembed.orchestrator.driver.evaluations import evaluation_of, require_metric
from podembed.orchestrator.driver.shared import Shared
from podembed.orchestrator.events.progress import (
    Evaluated,
    EvaluationCut,
    HostMeasures,
    ProgramsCompiled,
    StoppedEarly,
    TablesMeasured,
    WindowReport,
    WindowTrained,
)
from podembed.orchestrator.group.worker_group import WorkerGroup
from podembed.orchestrator.planning.traffic import measured_tables
from podembed.workers.device.process import DeviceWindow
from podembed.workers.host.row_norms import table_norms
from podembed.workers.host.spec import HostWindow, ScoredSamples
from podembed.workers.job.window_figures import figures_of

LOOK_EVERY_S, LOOK_SHARE, LOOK_AT_LEAST_EVERY_S = 1.0, 0.04, 30.0
"""How often hosts look at samples: often at first, later each time that a generation has grown older by a 25th."""


class DriverWindows:
    """See the module.

    Attributes:
      deadlines: deadlines that a group begins with.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        job = shared.run.job
        self._health = WindowHealth.of(
            shared.config.failure_config,
            job.table_names,
            invalid_ids=[table.invalid_ids for table in job.tables],
            emit=shared.emit,
        )
        self.deadlines = self._health.deadlines
        self._owners: Mapping[str, Sequence[int]] | None = None
        self._num_compiled, self._compiled_s = 0, 0.0
        self._began_s = shared.clock.monotonic_s()
        self._looked_s = -math.inf

    def _keys_are_evaluated(self, step: int) -> bool:
        """Whether an evaluation after so many steps looks up keys that come and go: it must not see what the next step
        decides.
        """
        shared = self._shared
        has_keys = any(table.dynamic_keys is not None for table in shared.run.job.tables)
        return has_keys and shared.saves.schedule.evaluates_at(step)

    def placed(self, owners: Mapping[str, Sequence[int]]) -> None:
        """Takes in who owns each bucket of each table."""
        self._owners = owners
        self._health.placed(owners)

    def train(self, group: WorkerGroup, first: int, last: int, *, commits: BackgroundCommits) -> float:
        """Runs steps `first` to `last - 1`; the seconds of one step.

        Args:
          commits: to tell the user of the last one, and of saves that failed since.

        Raises:
          JobFailed: a loss is not finite, or more rows are malformed than the job tolerates.
          WorkerFailure: as `WorkerGroup.train`.
        """
        shared = self._shared
        began_s = shared.clock.monotonic_s()
        # The lookup of a step right after a commit must see every update. Otherwise a run that goes on would differ
        # from one that resumes there.
        is_first = not shared.journal.tables
        hosts, devices = group.train(
            first,
            last,
            is_followed=not shared.saves.may_follow(last) and not self._keys_are_evaluated(last),
            is_profiled=is_first,
            is_sampled=self._is_look_due(began_s),
        )
        ended_s = shared.clock.monotonic_s()
        shared.journal.tell_unknown([host.unknown for host in hosts])
        shared.journal.put_aside([row for host in hosts for row in host.bad_rows])
        num_steps, names = last - first, shared.run.job.table_names
        shared.journal.vocabularies.take(
            [{names[at]: counts for at, counts in host.vocabularies.items()} for host in hosts]
        )
        group.deadlines = self._health.take(hosts, seconds=ended_s - began_s, num_steps=num_steps)
        if not all(map(math.isfinite, devices[0].losses)):
            # Wrong rows of a host that lived on may be why.
            group.prove()
        # An error here does not end a save that began before.
        _require_finite(first, devices[0].losses, has_commit=commits.begun_step > 0)
        self._tell_compiled(last, devices)
        if is_first:
            self._tell_tables(last, hosts, num_steps=num_steps)
        done = shared.journal.history.window(
            generation=shared.claims.generation,
            first_step=first,
            losses=devices[0].losses,
            num_samples=sum(host.num_samples for host in hosts),
            phase_s=hosts[0].phase_s,
            phase_cpu_s=hosts[0].phase_cpu_s,
            began_s=began_s,
            ended_s=ended_s,
        )
        shared.emit(
            WindowTrained(
                report=WindowReport(
                    step=last,
                    total_steps=shared.saves.schedule.total_steps,
                    samples_per_s=done.samples_per_s,
                    loss=done.loss,
                    phase_s={phase: spent / num_steps for phase, spent in hosts[0].phase_s.items()},
                    num_hosts=group.num_hosts,
                    generation=shared.claims.generation,
                    committed_step=commits.head.step if commits.head else 0,
                    committed_unix_s=commits.head.created_unix_s if commits.head else None,
                    slowest=self._health.slowest,
                    imbalance=self._health.imbalance.ratio,
                    staleness=shared.run.job.staleness,
                    failed_saves=commits.failed_in_a_row,
                    left_s=shared.journal.history.left_s(shared.saves.schedule.total_steps - last),
                ),
                first_step=first,
                num_samples=done.num_samples,
                seconds=done.seconds,
                figures=figures_of([device.quality for device in devices]),
                norms=devices[0].norms,
                tables=table_norms([host.row_norms for host in hosts], began_anew=shared.run.record.warm_start is None),
                rates={table: rate for table, rate in zip(names, hosts[0].rates, strict=False) if rate},
                hosts=_measures(hosts, devices, names),
                rounds=devices[0].rounds,
            )
        )
        return done.seconds / num_steps

    def _is_look_due(self, now_s: float) -> bool:
        every_s = min(LOOK_AT_LEAST_EVERY_S, max(LOOK_EVERY_S, LOOK_SHARE * (now_s - self._began_s)))
        if now_s - self._looked_s < every_s:
            return False
        self._looked_s = now_s
        return True

    def _tell_compiled(self, step: int, devices: Sequence[DeviceWindow]) -> None:
        total, seconds = devices[0].num_compiled, max(device.compiled_s for device in devices)
        if total > self._num_compiled:
            self._shared.emit(
                ProgramsCompiled(
                    step=step,
                    num_programs=total - self._num_compiled,
                    seconds=seconds - self._compiled_s,
                    total=total,
                )
            )
        self._num_compiled, self._compiled_s = total, seconds

    def _tell_tables(self, step: int, hosts: Sequence[HostWindow], *, num_steps: int) -> None:
        plans = self._shared.plans
        found = plans.tables(len(hosts), plans.chosen, previous=self._owners)
        tables = measured_tables(self._shared.run.job, found, hosts, num_steps=num_steps)
        if tables:
            self._shared.journal.tables = tables
            self._shared.emit(TablesMeasured(step=step, tables=tables))

    def evaluate(self, group: WorkerGroup, step: int, *, is_at_end: bool = False) -> None:
        """Scores the evaluation samples with the state after `step` steps, unless a signal asks the run to end before
        that is done: then there are no figures, and the journal owes them.

        Args:
          is_at_end: all is committed, so it decides nothing.

        Raises:
          ConfigurationError: the best commits hang on a metric that it does not have.
          JobFailed, WorkerFailure: as `train`.
        """
        shared, job = self._shared, self._shared.run.job
        began_s = shared.clock.monotonic_s()
        parts = self._scored(group)
        if parts is None:
            shared.journal.owed_step = step
            seconds = shared.clock.monotonic_s() - began_s
            shared.emit(EvaluationCut(step=step, seconds=seconds, reason=str(shared.stop.reason)))
            return
        shared.journal.owed_step = None
        shared.journal.tell_unknown([part.unknown for part in parts])
        shared.journal.put_aside([row for part in parts for row in part.bad_rows])
        self._health.take_evaluation(parts)
        evaluation = evaluation_of(job, parts, step=step)
        shared.journal.history.evaluation(evaluation, seconds=shared.clock.monotonic_s() - began_s)
        orders = declared_orders(job.metrics)
        shared.emit(Evaluated(evaluation=evaluation, best_auc=job.best_auc, baseline=job.baseline, orders=orders))
        if not is_at_end:
            require_metric(job, shared.config.checkpoint_config, evaluation)
            shared.journal.early_stop.take(step, evaluation.values)
            if (reason := shared.journal.early_stop.reason) is not None:
                shared.emit(StoppedEarly(step=step, total_steps=shared.saves.schedule.total_steps, reason=reason))

    def _scored(self, group: WorkerGroup) -> list[ScoredSamples] | None:
        """Each host's samples; None where a signal came first.

        A full ranking takes minutes, and whoever sends a signal may not wait so long. So batches are scored in blocks
        that take as long as a window of steps.
        """
        clock, stop = self._shared.clock, self._shared.stop
        first, batch_s = 0, None
        # What stops for another reason than a signal, such as a callback, may want the figures.
        while not stop.is_signalled:
            last = window_end(
                step=first, boundary=sys.maxsize, step_s=batch_s, target_s=window_target_s(group.num_hosts)
            )
            began_s = clock.monotonic_s()
            if (parts := group.evaluate(first, last)) is not None:
                return parts
            first, batch_s = last, (clock.monotonic_s() - began_s) / (last - first)
        return None


def _measures(
    hosts: Sequence[HostWindow], devices: Sequence[DeviceWindow], tables: Sequence[str]
) -> tuple[HostMeasures, ...]:
    found = []
    for number, (host, device) in enumerate(zip(hosts, devices, strict=True)):
        by_process = {usage.process: usage for usage in (host.usage, device.usage) if usage is not None}
        found.append(
            HostMeasures(
                host=number,
                num_samples=host.num_samples,
                phase_s=host.phase_s,
                bytes_sent=host.bytes_sent,
                rows_asked=dict(zip(tables, host.rows_asked, strict=False)),
                vocabularies={tables[at]: counts for at, counts in host.vocabularies.items()},
                usage=tuple(by_process.values()),
                data=host.data,
            )
        )
    return tuple(found)


def _require_finite(first: int, losses: Sequence[float], *, has_commit: bool) -> None:
    """A loss that is not finite has spoilt the parameters; nothing of them may be committed.

    Raises:
      JobFailed: naming the first such step.
    """
    step = next((step for step, loss in enumerate(losses, first) if not math.isfinite(loss)), None)
    if step is None:
        return
    stands = "The last commit, from before, stands." if has_commit else "Nothing is committed yet."
    remedy = (
        "Lower the learning rates, clip the dense gradients (optax.clip_by_global_norm) or the rows' (clipvalue), or "
        "look for extreme inputs."
    )
    if step == 0:
        # No rate and no gradient had a part in it.
        remedy = "No update came before it, so look at the first values of parameters and tables, and at the inputs."
    raise JobFailed(f"The loss of step {step} is {losses[step - first]}. Expected a finite number. {stands} {remedy}")
