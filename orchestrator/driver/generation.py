"""`Generation`: one set of worker processes under one lease. It is made, trains until it ends or is lost, and is thrown
away; the next one begins from the last commit.

What outlives it is in `Shared`; `Groups` keeps those of its processes that live on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from podembed.orchestrator.api.clock import Clock, at_most_every
from podembed.orchestrator.api.run_errors import FailureKind, WorkerFailure, is_host_fault
from podembed.orchestrator.api.signals import NOW_S, StoppedAtStart
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.commit.vanished import RunVanished
from podembed.orchestrator.decisions.failure import window_end, window_target_s
from podembed.orchestrator.driver.committing import Committing
from podembed.orchestrator.driver.recovery import LostGeneration, announce, stop_lost
from podembed.orchestrator.driver.shared import Shared
from podembed.orchestrator.driver.windows import DriverWindows
from podembed.orchestrator.events.commits import HeartbeatMissed, RunVanishing
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.run import GenerationEnded, WarmStarted, WorkersKilled
from podembed.orchestrator.group.generation_plan import plan_generation, renumbered
from podembed.orchestrator.group.survivors import Groups
from podembed.orchestrator.group.worker_group import WorkerGroup
from podembed.orchestrator.run.finished import OWES_EVALUATION
from podembed.workers.liveness.progress import Stopwatch
from podembed.workers.storage.storage_errors import StorageError

# table → owner of each bucket, by the numbers of the hosts of one generation.
Placement = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The generation ended with a commit of `step`: the run is done, or was asked to end."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsLeave:
    """The generation ended in order, with everything committed, for other hosts. Not a fault."""

    why: str


class Generation:
    """See the module.

    Args:
      base: the commit that it starts from; None before the first.
      before: who owned what in the generation before, for hosts that live on.
      stopwatch: stopwatch of the start, which began with the lease.

    Attributes:
      group: its processes, from their launch on.
      placement: who owns what, from the plan on; until then `before`.
    """

    def __init__(
        self, shared: Shared, lease: Lease, base: Manifest | None, *, before: Placement | None, stopwatch: Stopwatch
    ) -> None:
        self.lease = lease
        self.group: WorkerGroup | None = None
        self.placement = before
        self._shared = shared
        self._base = base
        self._stopwatch = stopwatch
        self._heartbeat = DriverHeartbeat(lease, shared.groups, emit=shared.emit, clock=shared.clock)
        self._kept: Mapping[int, int] = {}
        # There are none while it starts.
        self._committing: Committing | None = None

    @property
    def base_step(self) -> int:
        return self._base.step if self._base else 0

    def run(self, fault: LostGeneration | None) -> Finished | HostsLeave:
        """Starts the processes and trains, until the end, a stop, or a change of hosts.

        Args:
          fault: fault that ended the generation before, if one did.

        Raises:
          StoppedAtStart: it was asked to stop before it trained.
          WorkerFailure: it is lost; to be given to `lost`.
          JobFailed, and what ends a run: see `Driver.run`.
        """
        shared, lease = self._shared, self.lease
        windows = DriverWindows(shared)
        group = self.group = self._launched(windows)
        placement = self._formed(group, compares_first=fault is not None and fault.doubts_rows)
        windows.placed(placement)
        announce(shared, group, self._base, fault, survivors=len(self._kept), before_s=self._stopwatch.seconds)
        shared.watch.began(group.handles, generation=lease.generation)
        committing = self._committing = Committing(shared, group, lease, self._base, placement)
        ending = self._train(group, windows, committing)
        shared.trace.leave()
        if isinstance(ending, Finished):
            self._let_go(group)
        return ending

    def poll(self) -> None:
        """What is done while waiting for workers: the heartbeat, a commit under way, and a look at the machines. While
        workers start, it also leaves at once if asked to stop.
        """
        self._heartbeat.poll()
        if self._committing is not None:
            self._committing.commits.poll()
            self._shared.watch.look()
        elif self._shared.stop.reason is not None:
            raise StoppedAtStart(self._shared.stop.reason)

    # ------------------------------------------------------------------ its start

    def _launched(self, windows: DriverWindows) -> WorkerGroup:
        """Chooses the hosts and launches their processes."""
        shared, stopwatch = self._shared, self._stopwatch
        num_hosts = shared.watch.choose(self.poll, step=self.base_step)
        stopwatch.end("choice of hosts")
        shared.reporter.activity(f"starting the processes of {plural(num_hosts, 'host')}")
        group, self._kept = shared.groups.next(num_hosts, deadlines=windows.deadlines, on_poll=self.poll)
        stopwatch.end("processes")
        group.activity = shared.reporter.activity
        return group

    def _formed(self, group: WorkerGroup, *, compares_first: bool) -> Placement:
        """Plans who owns what, makes a generation of the processes and brings them to the commit.

        Args:
          compares_first: flag of `HostSpec`.
        """
        shared, base = self._shared, self._base
        before = base.placement if base else None
        if base and self._kept and self.placement is not None:
            before = renumbered(self.placement, self._kept, num_hosts=group.num_hosts)
        chosen = shared.patiently(lambda: shared.plans.begin(num_hosts=group.num_hosts, step=self.base_step))
        plan = plan_generation(
            shared.run,
            shared.config,
            self.lease.generation,
            base,
            before,
            num_hosts=group.num_hosts,
            threads=shared.threads,
            devices=shared.scaling.devices,
            chosen=chosen,
            platform=shared.platform,
        )
        self.placement = plan.placement
        hosts = [replace(host, compares_first=compares_first) for host in plan.hosts]
        group.form(hosts, plan.device, kept=self._kept, base=base)
        beginning = shared.run.beginning() if base is None else None
        if beginning is None:
            group.restore(base)
        else:
            shared.emit(
                WarmStarted(
                    run_id=beginning.plan.run_id, commit=beginning.plan.commit, description=beginning.plan.describe()
                )
            )
            group.warm_start(beginning)
        return plan.placement

    # ------------------------------------------------------------------ its training

    def _train(self, group: WorkerGroup, windows: DriverWindows, committing: Committing) -> Finished | HostsLeave:
        """Windows of steps, with commits and evaluations at their boundaries, until the end or a stop.

        A commit begins at its boundary and is written while the next windows run; the end waits for the last one.
        """
        shared, commits = self._shared, committing.commits
        schedule, saves, run = shared.saves.schedule, shared.saves, shared.run
        trace = shared.trace
        trace.begin(self.base_step, schedule.total_steps, generation=self.lease.generation)
        step, step_s, evaluated_step = self.base_step, None, None
        # A generation that was lost before the first commit counted, too.
        counters, metrics = (self._base.counters, self._base.metrics) if self._base is not None else ({}, {})
        shared.journal.vocabularies.begin(counters)
        shared.journal.early_stop.begin(counters, metrics)
        if OWES_EVALUATION in counters and schedule.evaluates_at(step):
            self._evaluate_late(group, windows, committing)
            evaluated_step = step
        saves.begin(step, run.committed(self.lease) if shared.config.checkpoint_config.on_best else ())
        while step < schedule.total_steps and not shared.is_stopping:
            end = window_end(
                step=step,
                boundary=min(saves.next_boundary(step), trace.boundary(step)),
                step_s=step_s,
                target_s=window_target_s(group.num_hosts),
            )
            trace.before(group, step)
            step_s = windows.train(group, step, end, commits=commits)
            shared.groups.trained(group, run.job_for_workers, run.table_buckets)
            step = end
            trace.after(step)
            if schedule.evaluates_at(step):
                with trace.driver.span("work", "evaluation", step=step):
                    windows.evaluate(group, step)
                evaluated_step = step
            other_plan = None
            if is_at_commit := saves.take(step, shared.journal.metrics_at(step)):
                # The plan that follows a commit must be known before the commit is: a restart from there follows it.
                other_plan = shared.plans.leaves(step)
                committing.begin(step)
            if step < schedule.total_steps and not shared.is_stopping:
                if other_plan is not None:
                    return self._left(other_plan, step, committing)
                shared.watch.paced(to_commit_s=saves.to_next_save(step, step_s))
                if (why := shared.watch.leaves(is_at_commit=is_at_commit)) is not None:
                    return self._left(why, step, committing)
        if shared.is_stopping and step > commits.begun_step:
            committing.begin(step)
        elif step == schedule.total_steps and shared.evaluates_at_end and evaluated_step != step:
            windows.evaluate(group, step, is_at_end=True)
        committing.conclude(step)
        return Finished(step=step)

    def _evaluate_late(self, group: WorkerGroup, windows: DriverWindows, committing: Committing) -> None:
        """Makes the evaluation that the base commit owes, and commits its figures. What follows, such as which commits
        are the best, is then as if the evaluation had been made before that commit.
        """
        windows.evaluate(group, self.base_step)
        if self._shared.journal.owed_step is None:
            committing.begin(self.base_step)
            committing.commits.finish()

    def _left(self, why: str, step: int, committing: Committing) -> HostsLeave:
        """Ends training in order, with everything committed, because other hosts are wanted."""
        self._shared.watch.left(why, step=step)
        if step > committing.commits.begun_step:
            committing.begin(step)
        committing.commits.finish()
        return HostsLeave(why=why)

    # ------------------------------------------------------------------ its end

    def _let_go(self, group: WorkerGroup) -> None:
        """Lets the workers go. All is committed by now, so one that does not leave in order is no fault of the run."""
        try:
            group.close()
        except WorkerFailure as failure:
            self._shared.emit(WorkersKilled(reason=str(failure)))

    def give_way(self, leave: HostsLeave) -> None:
        """Ends it for a change of hosts. Those that stay live on for the next one."""
        self._shared.reporter.close()
        self._shared.emit(GenerationEnded(generation=self.lease.generation, reason=leave.why))
        if self.group is not None:
            self._shared.groups.salvage(self.group, leave.why)

    def finish_commits(self, *, can_finish: bool = True) -> None:
        """Publishes what was frozen before an error, if the workers have written it. The error has not touched that
        state.

        Args:
          can_finish: the workers live, so that they may finish writing.
        """
        if self._committing is not None:
            self._committing.commits.leave(can_finish=can_finish)

    def lost(self, failure: WorkerFailure, before: LostGeneration | None) -> LostGeneration | None:
        """Ends it after a failure of its workers. What lives on is used for the next one.

        Args:
          before: the fault that it was to recover from, if there was one.

        Returns:
          The fault that the next generation recovers from.

        Raises:
          JobFailed, WorkerRefused, ConfigurationError, CrashLoop: another generation would not help.
        """
        shared, is_starting = self._shared, self._committing is None
        is_proven = self.group is None or self.group.is_proven
        gone = (FailureKind.DIED, FailureKind.HUNG)
        shared.trace.cut(str(failure), [one.worker for one in failure.failures if one.worker and one.kind in gone])
        if is_starting and self._kept and not is_host_fault(failure.failures):
            # Nothing has been trained yet, so an error of the job would come again with new processes.
            shared.groups.give_up_survivors(str(failure))
            return before
        noticed_s = shared.clock.wall_s()
        self.finish_commits(can_finish=not is_host_fault(failure.failures))
        committed = self.lease.head_step
        decision = shared.watch.failed(
            failure,
            group=None if is_starting else self.group,
            has_committed=committed > self.base_step,
        )
        is_damaged = any(one.kind is FailureKind.DAMAGED for one in failure.failures)
        # A start that failed has not compared all.
        still_doubts = is_starting and before is not None and before.doubts_rows
        lost = stop_lost(
            shared,
            self.group,
            decision,
            failure.failures,
            noticed_s=noticed_s,
            base_step=max(committed, self.base_step),
            doubts_rows=is_damaged or still_doubts or not (is_proven or is_host_fault(failure.failures)),
        )
        if is_starting and before is not None:
            # Nothing was done again yet of what the fault before took.
            lost = replace(lost, reached_step=max(lost.reached_step, before.reached_step))
        return lost

    def close(self) -> None:
        """Ends all of it that lives and was not kept for the next one."""
        self._shared.trace.cut("training ended")
        if self._committing is not None:
            self._committing.commits.close(timeout_s=NOW_S if self._shared.stop.is_now else None)
        if self.group is not None:
            self.group.stop()
        self._shared.reporter.close()


HEARTBEAT_S = 5.0


class DriverHeartbeat:
    """Writes, while the driver waits for workers, that it lives, and notices that it was replaced.

    Mutated: the time of the last one, and whether the run was gone then.
    """

    def __init__(self, lease: Lease, groups: Groups, *, emit: Emit, clock: Clock) -> None:
        self._groups = groups
        self._emit = emit
        self._lease = lease
        self._has_vanished = False
        self.poll = at_most_every(HEARTBEAT_S, self._beat, clock.monotonic_s)
        """To be called often. Raises `Fenced` where a newer driver has the run."""

    def _beat(self) -> None:
        """Writes the heartbeat. It is advisory: while the storage is away, training goes on, and commits say themselves
        if they fail.
        """
        self._groups.ping_survivors()
        try:
            self._lease.heartbeat()
            self._lease.require_newest()
            self._has_vanished = False
        except RunVanished as error:
            # A disk may come back; whether it has is asked when it matters, at the next commit.
            if not self._has_vanished:
                self._emit(RunVanishing(reason=str(error)))
            self._has_vanished = True
        except (StorageError, OSError) as error:
            self._groups.ping_survivors(all_workers=True)
            self._emit(HeartbeatMissed(reason=str(error)))
