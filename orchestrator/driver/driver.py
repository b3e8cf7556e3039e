"""The driver: one loop that plans, starts, trains in windows, commits, evaluates and recovers. Read this file first.

The driver names steps, not data, and holds no state that matters: what counts is what the run's folder says was
committed. One pass of `Driver.run`'s loop is one generation; a host fault ends it, and the next one begins from the
last commit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock, at_most_every
from podembed.orchestrator.api.config import Recovery, Result, RunConfig, ScalingConfig, check_policies
from podembed.orchestrator.api.errors import JobFailed, WorkerFailure, is_host_fault
from podembed.orchestrator.api.intervals import known_steps
from podembed.orchestrator.api.signals import NOW_S, StoppedAtStart, StopSignals
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.cluster.device_notices import device_notices
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.commit.storage_wait import StorageWait, at_once
from podembed.orchestrator.commit.vanished import RunVanished
from podembed.orchestrator.decisions.failure import Recover, Schedule, window_end, window_target_s
from podembed.orchestrator.decisions.host_watch import Cluster, HostsLeave, HostWatch
from podembed.orchestrator.decisions.table_plan import plan, summary
from podembed.orchestrator.decisions.window_health import WindowHealth
from podembed.orchestrator.driver.background_commit import BackgroundCommits
from podembed.orchestrator.driver.console import Reporter, WindowReport, describe_filling
from podembed.orchestrator.driver.evaluations import evaluation_of, require_metric
from podembed.orchestrator.driver.patience import FailedSave, Patience
from podembed.orchestrator.driver.publication import Publisher, PublishingThread, RunPublication
from podembed.orchestrator.driver.saves import Saves
from podembed.orchestrator.driver.upkeep import Upkeep
from podembed.orchestrator.group.filling_alarms import filling_alarms
from podembed.orchestrator.group.generation_plan import plan_generation, renumbered
from podembed.orchestrator.group.survivors import Groups
from podembed.orchestrator.group.worker_group import Backend, WorkerGroup
from podembed.orchestrator.run.dead_letters import DeadLetters
from podembed.orchestrator.run.history import History
from podembed.orchestrator.run.history_record import HistoryKeeper
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.data.bad_rows import BadRow
from podembed.workers.liveness.progress import Laps
from podembed.workers.storage.errors import StorageError

HEARTBEAT_S = 5.0
NOTABLE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A lost generation, on the way to the next one. `stopped_s` is the clock's reading when it was gone."""

    cause: str
    reached_step: int
    detect_s: float
    stop_s: float
    stopped_s: float


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
        self._run = run
        self._watch = HostWatch(
            cluster,
            scaling=scaling,
            limits=config.failure_config,
            notice=reporter.notice,
            describe_plan=self._describe_plan,
            clock=clock,
        )
        self._resources = scaling.resources_per_host
        self._config = config
        self._backend = backend
        self._reporter = reporter
        self._stop = stop
        self._clock = clock
        self._publisher = publisher
        self._history = History()
        self._keeper = HistoryKeeper(run.store, notice=reporter.notice)
        eval_every = known_steps("eval_every_steps", config.eval_every_steps)
        self._schedule = Schedule(
            total_steps=config.last_step(run.total_steps),
            save_policies=config.checkpoint_config.save_policies,
            eval_every=eval_every if run.eval_index is not None else None,
        )
        self._saves = Saves(self._schedule, monotonic=clock.monotonic_s)
        check_policies(run.job, config)
        self._committed_unix_s: float | None = None
        self._is_starting = False
        self._lease: Lease | None = None
        self._groups = Groups(
            backend, standby_after_s=config.failure_config.standby_after_s, notice=reporter.notice, clock=clock
        )
        self._dead_letters: DeadLetters | None = None
        self._commits: BackgroundCommits | None = None
        self._upkeep = Upkeep(run.store, run.record, config.checkpoint_config, unix_s=clock.wall_s)
        self._has_vanished = False
        greet = at_most_every(HEARTBEAT_S, self._groups.greet, clock.monotonic_s)
        timeout_s = config.failure_config.storage_timeout_s
        self._storage_wait = StorageWait(timeout_s, stop=stop, notice=reporter.notice, clock=clock, meanwhile=greet)

    def run(self) -> Result:
        """Trains until all steps are done, or until a signal asks to stop.

        Raises:
          JobFailed: the job, its data or its model raised.
          CrashLoop: host faults came one after another without a commit in between.
          TooFewHosts: there were too few hosts for too long.
          Fenced: another driver took the run.
        """
        try:
            return self._generations()
        except StoppedAtStart:
            if self._lease is None:
                raise
            step = self._run.head_step(self._lease)
            self._history.cut(step)
            return self._result(step, self._lease.head)
        finally:
            self._groups.stop()
            # However the run ended: who mends what stopped it should not have to wait for the heartbeat to grow old.
            if self._lease is not None:
                with contextlib.suppress(StorageError, OSError):
                    self._stop.ending(self._lease.release)

    def _generations(self) -> Result:
        """Generation after generation until one ends well."""
        fault: _Fault | None = None
        while True:
            laps = Laps(self._clock.monotonic_s)
            # A storage that is away when the program starts is told at once; a run that is under way waits for it.
            patiently = self._storage_wait if self._run.generation else at_once
            self._lease = lease = self._run.acquire(patiently)
            base = patiently(lambda lease=lease: self._run.load_base(lease))
            laps.end("lease")
            base_step = base.step if base else 0
            self._committed_unix_s = base.created_unix_s if base else None
            self._history.cut(base_step)
            self._keeper.begin(base_step)
            group: WorkerGroup | None = None
            kept: Mapping[int, int] = {}
            try:
                self._is_starting = True
                num_hosts = self._watch.choose(self._poll(lease), step=base_step)
                laps.end("choice of hosts")
                self._health = WindowHealth.of(
                    self._config.failure_config, self._run.job.table_names, notice=self._reporter.notice
                )
                self._reporter.activity(f"starting the processes of {plural(num_hosts, 'host')}")
                group, kept = self._groups.next(num_hosts, deadlines=self._health.deadlines, on_poll=self._poll(lease))
                laps.end("processes")
                group.activity = self._reporter.activity
                self._start(group, lease, base, kept)
                self._is_starting = False
                self._announce(group, lease, base, fault, survivors=len(kept), before_s=laps.seconds)
                self._watch.began(group.handles, generation=lease.generation)
                self._commits = self._commits_of(group, lease, base)
                result = self._generation(group, lease, self._commits)
                self._leave(group)
                return result
            except HostsLeave as change:
                fault = None
                self._reporter.close()
                self._reporter.notice(f"generation {lease.generation} ends for other hosts: {change}")
                if group is not None:
                    self._groups.salvage(group, str(change))
            except JobFailed:
                # What was frozen before is good, and the workers live.
                self._leave_commits(can_finish=True)
                raise
            except WorkerFailure as failure:
                if self._is_starting and kept and not is_host_fault(failure.failures):
                    # Nothing has been trained yet; what is wrong with the job comes again with new processes.
                    self._groups.give_up_survivors(str(failure))
                    continue
                noticed_s = self._clock.wall_s()
                self._leave_commits(can_finish=not is_host_fault(failure.failures))
                committed = self._run.head_step(lease)
                decision = self._watch.failed(
                    failure, group=None if self._is_starting else group, has_committed=committed > base_step
                )
                fault = self._stop_lost(group, decision, noticed_s, max(committed, base_step))
            finally:
                if self._commits is not None:
                    self._commits.close(timeout_s=NOW_S if self._stop.is_now else None)
                    self._commits = None
                if group is not None:
                    group.stop()
                self._reporter.close()

    def _poll(self, lease: Lease) -> Callable[[], None]:
        """What is done while waiting for workers: the heartbeat; a commit under way; a look at the machines; and while
        they start, leaving at once if asked to stop.
        """
        heartbeat = at_most_every(HEARTBEAT_S, lambda: self._beat(lease), self._clock.monotonic_s)

        def poll() -> None:
            heartbeat()
            if self._commits is not None:
                self._commits.poll()
            if self._is_starting and self._stop.reason is not None:
                raise StoppedAtStart
            if not self._is_starting:
                self._watch.look()

        return poll

    def _describe_plan(self, num_hosts: int) -> str:
        return summary(plan(self._run.job, num_hosts=num_hosts, table_buckets=self._run.table_buckets))

    def _beat(self, lease: Lease) -> None:
        """Writes the heartbeat. It is advisory: while the storage is away, training goes on, and commits say themselves
        if they fail.
        """
        self._groups.greet()
        try:
            lease.heartbeat()
            lease.require_newest()
            self._has_vanished = False
        except RunVanished as error:
            # A disk may come back; whether it has is asked when it matters, at the next commit.
            if not self._has_vanished:
                self._reporter.notice(
                    f"THE RUN HAS VANISHED; it ends at the next commit unless its files are back. {error}"
                )
            self._has_vanished = True
        except (StorageError, OSError) as error:
            self._groups.greet(all_workers=True)
            self._reporter.notice(
                f"the heartbeat was not written, so another driver may take this one for gone: {error}"
            )

    # ------------------------------------------------------------------ one generation

    def _start(self, group: WorkerGroup, lease: Lease, base: Manifest | None, kept: Mapping[int, int]) -> None:
        """Plans who owns what, makes a generation of the processes and brings them to the commit.

        Args:
          kept: hosts that live on from the generation before, with their numbers in that.
        """
        before = base.placement if base else None
        if base and kept:
            before = renumbered(self._placement, kept, num_hosts=group.num_hosts)
        plan = plan_generation(self._run, self._config, lease.generation, base, before, num_hosts=group.num_hosts)
        self._placement = plan.placement
        group.form(plan.hosts, plan.device, kept=kept, base=base)
        self._fill(group, base)

    def _fill(self, group: WorkerGroup, base: Manifest | None) -> None:
        """Brings the workers to the commit; before the first one, to what the run begins from."""
        beginning = self._run.beginning() if base is None else None
        if beginning is None:
            group.restore(base)
            return
        self._reporter.notice(beginning.plan.describe())
        group.warm_start(beginning)

    def _generation(self, group: WorkerGroup, lease: Lease, commits: BackgroundCommits) -> Result:
        """Windows of steps, with commits and evaluations at their boundaries, until the end or a stop.

        A commit begins at its boundary and is written while the next windows run; the end waits for the last one.
        """
        step = commits.begun_step
        self._saves.begin(step, self._run.committed(lease) if self._config.checkpoint_config.on_best else ())
        step_s: float | None = None
        while step < self._schedule.total_steps and self._stop.reason is None:
            end = window_end(
                step=step,
                boundary=self._saves.next_boundary(step),
                step_s=step_s,
                target_s=window_target_s(group.num_hosts),
            )
            step_s = self._window(group, step, end, commits)
            self._groups.trained(group, self._run.job_for_workers, self._run.table_buckets)
            step = end
            if self._schedule.evaluates_at(step):
                self._evaluate(group, step)
            if is_at_commit := self._saves.take(step, self._metrics_at(step)):
                self._begin_commit(group, lease, commits, step)
            if step < self._schedule.total_steps and self._stop.reason is None:
                self._watch.paced(to_commit_s=self._saves.to_next_save(step, step_s))
                self._change_hosts(group, lease, commits, step, is_at_commit=is_at_commit)
        if self._stop.reason is not None and step > commits.begun_step:
            self._begin_commit(group, lease, commits, step)
        elif self._stop.reason is None and self._config.evaluate_at_end and self._run.eval_index is not None:
            self._evaluate(group, step)
        commits.conclude(step, self._publication(group, lease, step))
        self._upkeep.require(lease, commits.head)
        self._record_last(lease, step)
        return self._result(step, lease.head)

    def _record_last(self, lease: Lease, step: int) -> None:
        """The evaluation at the end comes after the last commit, and so after its record."""
        if self._metrics_at(step):
            self._keeper.write(self._keeper.record(self._history, generation=lease.generation, step=step))
        self._keeper.tell()

    def _change_hosts(
        self, group: WorkerGroup, lease: Lease, commits: BackgroundCommits, step: int, *, is_at_commit: bool
    ) -> None:
        """Where other hosts are wanted, ends the generation in order, with everything committed.

        Raises:
          HostsLeave: it ended.
        """
        why = self._watch.leaves(is_at_commit=is_at_commit)
        if why is None:
            return
        self._watch.left(why, step=step)
        if step > commits.begun_step:
            self._begin_commit(group, lease, commits, step)
        commits.finish()
        raise HostsLeave(why)

    def _leave(self, group: WorkerGroup | None) -> None:
        """Lets the workers go. All is committed by now, so one that does not leave in order is no fault of the run."""
        try:
            if group is not None:
                group.close()
        except WorkerFailure as failure:
            self._reporter.notice(f"workers were ended without leaving in order: {failure}")

    def _window(self, group: WorkerGroup, first: int, last: int, commits: BackgroundCommits) -> float:
        """Runs steps `first` to `last - 1`; the seconds of one step."""
        began_s = self._clock.monotonic_s()
        # The lookup of a step that a commit comes before must see every update, in a run that goes on as in one that
        # resumes there.
        hosts, devices = group.train(first, last, is_followed=not self._saves.may_follow(last))
        ended_s = self._clock.monotonic_s()
        self._put_aside([row for host in hosts for row in host.bad_rows])
        group.deadlines = self._health.take(hosts, seconds=ended_s - began_s, num_steps=last - first)
        self._check_losses(first, devices[0].losses)
        num_steps = last - first
        done = self._history.window(
            generation=self._run.generation,
            first_step=first,
            losses=devices[0].losses,
            num_samples=sum(host.num_samples for host in hosts),
            phase_s=hosts[0].phase_s,
            began_s=began_s,
            ended_s=ended_s,
        )
        self._reporter.window(
            WindowReport(
                step=last,
                total_steps=self._schedule.total_steps,
                samples_per_s=done.samples_per_s,
                loss=done.loss,
                phase_s={phase: spent / num_steps for phase, spent in hosts[0].phase_s.items()},
                num_hosts=group.num_hosts,
                generation=self._run.generation,
                committed_step=commits.committed_step,
                committed_unix_s=self._committed_unix_s,
                slowest=self._health.slowest,
                imbalance=self._health.imbalance.ratio,
                staleness=self._run.job.staleness,
                failed_saves=commits.failed_in_a_row,
                left_s=self._history.left_s(self._schedule.total_steps - last),
            )
        )
        return done.seconds / num_steps

    def _put_aside(self, rows: Sequence[BadRow]) -> None:
        """Writes malformed rows that hosts left out to the run's folder.

        Raises:
          JobFailed: there are more than the job tolerates.
        """
        if not rows:
            return
        if self._dead_letters is None:
            self._dead_letters = DeadLetters(self._run.store, max_bad_rows=self._run.job.data.max_bad_rows)
        letters = self._dead_letters
        if letters.add(rows, generation=self._run.generation):
            self._reporter.notice(f"{letters.num_rows} malformed rows left out so far, listed in {letters.location}")
        letters.require_good_rows(self._run.train_index)

    def _check_losses(self, first: int, losses: Sequence[float]) -> None:
        """A loss that is not finite has spoilt the parameters; nothing of them may be committed.

        Raises:
          JobFailed: naming the first such step.
        """
        for step, loss in enumerate(losses, first):
            if not math.isfinite(loss):
                raise JobFailed(
                    f"The loss of step {step} is {loss}. Expected a finite number. The last commit, from before, "
                    "stands. Lower the learning "
                    "rates, clip the dense gradients (optax.clip_by_global_norm) or the rows' (clipvalue), or look "
                    "for extreme inputs."
                )

    def _evaluate(self, group: WorkerGroup, step: int) -> None:
        began_s = self._clock.monotonic_s()
        parts = group.evaluate()
        self._put_aside([row for part in parts for row in part.bad_rows])
        job = self._run.job
        evaluation = evaluation_of(job, parts, step=step)
        self._history.evaluation(evaluation, seconds=self._clock.monotonic_s() - began_s)
        self._reporter.evaluation(evaluation, best_auc=job.best_auc, baseline=job.baseline)
        if step < self._schedule.total_steps:
            require_metric(job, self._config.checkpoint_config, evaluation)

    def _commits_of(self, group: WorkerGroup, lease: Lease, base: Manifest | None) -> BackgroundCommits:
        def acknowledge(manifest: Manifest, seconds: float) -> None:
            group.acknowledge(manifest.name)
            self._committed_unix_s = manifest.created_unix_s
            self._watch.committed(seconds)
            self._reporter.commit(manifest.name, size_bytes=manifest.written_bytes, seconds=seconds)
            tell()

        def tell() -> None:
            self._keeper.tell()
            for sentence in self._upkeep.take():
                self._reporter.notice(sentence)

        def failed(save: FailedSave) -> None:
            tell()
            self._history.failed_saves += 1
            self._saves.failed(save.step)
            self._reporter.notice(str(save))

        bears = self._config.failure_config
        return BackgroundCommits(
            group,
            generation=lease.generation,
            head=base,
            full_every=self._config.checkpoint_config.full_every,
            acknowledge=acknowledge,
            failed=failed,
            notice=self._reporter.notice,
            patience=Patience(max_failed_saves=bears.max_failed_saves, timeout_s=bears.storage_timeout_s),
            clock=self._clock,
            publisher=self._publisher(),
            is_stopping=lambda: self._stop.reason is not None,
        )

    def _publication(self, group: WorkerGroup, lease: Lease, step: int) -> RunPublication:
        """How the state after `step` steps becomes a commit, once it is written."""
        return RunPublication(
            run=self._run,
            lease=lease,
            upkeep=self._upkeep,
            keeper=self._keeper,
            record=self._keeper.record(self._history, generation=lease.generation, step=step),
            step=step,
            placement=self._placement,
            num_hosts=group.num_hosts,
            metrics=self._metrics_at(step),
            read_back=self._config.checkpoint_config.read_back,
        )

    def _begin_commit(self, group: WorkerGroup, lease: Lease, commits: BackgroundCommits, step: int) -> None:
        """Begins a commit, and says so if training had to wait for the one before."""
        started = self._clock.monotonic_s()
        before = commits.begun_step
        commits.begin(step, self._publication(group, lease, step))
        waited_s = self._clock.monotonic_s() - started
        if waited_s >= NOTABLE_WAIT_S:
            self._reporter.notice(
                f"step {step}: training waited {waited_s:.1f} s to begin a commit; the one of step {before} was still "
                "being written. "
                f"Commit less often, or give the run a faster storage"
            )

    def _leave_commits(self, *, can_finish: bool) -> None:
        if self._commits is not None:
            self._commits.leave(can_finish=can_finish)

    def _metrics_at(self, step: int) -> dict[str, float]:
        """What an evaluation of exactly this state found; empty without one."""
        last = self._history.evaluations[-1:]
        return last[0].comparable if last and last[0].step == step else {}

    # ------------------------------------------------------------------ between generations

    def _announce(
        self,
        group: WorkerGroup,
        lease: Lease,
        base: Manifest | None,
        fault: _Fault | None,
        *,
        survivors: int,
        before_s: Mapping[str, float],
    ) -> None:
        """Says that a generation runs, and after a fault what that took; `before_s`: parts of the way back before the
        group was formed.
        """
        for told in [*group.refusals, *device_notices(group.devices, self._resources), *filling_alarms(group.filled)]:
            self._reporter.notice(told)
        if fault is None:
            origin = f"from commit {base.name}" if base else "from the first step"
            lived = f"; hosts that lived on: {survivors}, {describe_filling(group.filling)}" if survivors else ""
            self._reporter.notice(
                f"generation {lease.generation}: {group.num_hosts} host{'s' if group.num_hosts > 1 else ''}, {origin}; "
                f"started in {group.spent_s['start']:.1f} s, compiled in {group.spent_s['compile']:.1f} s{lived}"
            )
            return
        base_step = base.step if base else 0
        recovery = Recovery(
            generation=lease.generation,
            cause=fault.cause,
            base_step=base_step,
            discarded_steps=max(0, fault.reached_step - base_step),
            detect_s=fault.detect_s,
            stop_s=fault.stop_s,
            start_s=self._clock.monotonic_s() - fault.stopped_s - group.spent_s["restore"] - group.spent_s["compile"],
            restore_s=group.spent_s["restore"],
            compile_s=group.spent_s["compile"],
            parts_s={**before_s, **group.start_s},
            survivors=survivors,
            **group.filling,
        )
        self._history.recoveries.append(recovery)
        self._reporter.recovery(recovery)

    def _stop_lost(self, group: WorkerGroup | None, decision: Recover, noticed_s: float, base_step: int) -> _Fault:
        """Ends a lost generation."""
        self._reporter.close()
        self._reporter.notice(f"fault: {decision.cause}")
        reached, last_step_s = base_step, 0.0
        started = self._clock.monotonic_s()
        if group is not None:
            progress = group.last_progress()
            # A host counts the step it works on; that many are done.
            reached = max([base_step, *(p.step for p in progress if p.step_unix_s)])
            last_step_s = max((p.step_unix_s for p in progress), default=0.0)
            self._groups.salvage(group, decision.cause)
        return _Fault(
            cause=decision.cause,
            reached_step=reached,
            detect_s=max(0.0, noticed_s - last_step_s) if last_step_s else 0.0,
            stop_s=self._clock.monotonic_s() - started,
            stopped_s=self._clock.monotonic_s(),
        )

    def _result(self, step: int, commit: str | None) -> Result:
        history = self._history
        return Result(
            path=self._run.url,
            step=step,
            total_steps=self._schedule.total_steps,
            num_samples=history.num_samples,
            trained_s=history.trained_s,
            samples_per_s=history.num_samples / history.trained_s if history.trained_s > 0 else 0.0,
            median_samples_per_s=history.median_samples_per_s,
            num_windows=len(history.windows),
            losses=dict(history.losses),
            evaluations=tuple(history.evaluations),
            recoveries=tuple(history.recoveries),
            phase_s=dict(history.phase_s),
            commit=commit,
            stopped_by=self._stop.reason if step < self._schedule.total_steps else None,
            staleness=self._run.job.staleness,
            changes=tuple(self._watch.changes),
            failed_saves=history.failed_saves,
        )
