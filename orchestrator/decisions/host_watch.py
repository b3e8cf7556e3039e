"""`HostWatch`: what the driver knows of the machines under its run. It looks at the cluster every few seconds and
remembers what failed where. The pure functions of `orchestrator.decisions.membership` tell it how many hosts there
should be and when they change.

It starts and stops nothing and is used by the driver's thread only. Without a cluster (one host in the driver's
process) it always wants the same number. What it remembers is lost with the driver; nothing that matters hangs on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import FailureConfig, ScalingConfig
from podembed.orchestrator.api.result import HostsChange
from podembed.orchestrator.api.run_errors import Failure, FailureKind, TooFewHosts, WorkerFailure, is_host_fault, roots
from podembed.orchestrator.decisions.cluster import Cluster, gave_up, is_of_chip, marked_by_kernel, no_device
from podembed.orchestrator.decisions.failure import Budget, GiveUp, Recover, after_failure, ending
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import (
    Change,
    LeaveAfterWindow,
    LeaveAtCommit,
    LeaveNow,
    Node,
    Pace,
    Rules,
    Stay,
    Use,
    Wait,
    when_to_change,
)
from podembed.orchestrator.decisions.slices import choose
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.machines import RESTS_FOR, HostsAwaited, HostsChosen, HostsWillChange, MachineRests
from podembed.orchestrator.events.run import HostsChanged
from podembed.orchestrator.group.worker_group import HostHandles, WorkerGroup
from podembed.workers.liveness.worker import Worker

__all__ = ["LOOK_S", "SEEN_SETTLE_S", "SETTLE_S", "Cluster", "HostWatch"]

LOOK_S = 3.0  # between two looks at the cluster while a generation runs
WAIT_LOOK_S = 0.5  # while hosts are waited for
SETTLE_S = 5.0  # what a run gave back is counted as free again after a moment
SEEN_SETTLE_S = 15.0  # the same where it ended for machines that were there: with fewer hosts it ended for nothing
SAY_AFTER_S = 2.0
SAY_EVERY_S = 60.0
EARLY_S = 60.0  # a device process that fails sooner than that has something against its machine
FIRST_COMMIT_S = 5.0  # taken for the time of a commit before there was one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaving:
    """A change under way: from the end of the generation to the start of the next. `wanted`: hosts that there was room
    for.
    """

    cause: str
    step: int
    before: int
    wanted: int
    began_s: float


class HostWatch:
    """See the module.

    Args:
      cluster: None for hosts that are not on one.
      emit: callback that is told about decisions.
      describe_plan: what the plan for so many hosts puts on each, in a sentence without its full stop.
      clock: time, replaced in tests.

    Attributes:
      changes: planned changes of hosts so far.
      budget: what went wrong so far.
      num_hosts: number of hosts of the generation that was chosen last.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        *,
        scaling: ScalingConfig,
        limits: FailureConfig,
        emit: Emit,
        describe_plan: Callable[[int], str] = lambda num_hosts: "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.changes: list[HostsChange] = []
        self.budget = Budget()
        self.num_hosts = scaling.least_hosts
        self._cluster = cluster
        self._scaling = scaling
        self._limits = limits
        self._emit = emit
        self._describe_plan = describe_plan
        self._clock = clock
        self._quarantine = Quarantine(
            after=limits.quarantine_after, first_s=limits.quarantine_s, period_s=limits.quarantine_period_s
        )
        self._rests_for = ""
        self._began_s: float | None = None
        self._hosts: tuple[FailureDomain | None, ...] = ()
        self._nodes: Sequence[Node] = ()
        self._looked_s = -math.inf
        self._wanted: Use | Wait | None = None
        self._grows = 0
        self._pace = Pace(to_commit_s=None, commit_s=FIRST_COMMIT_S)
        self._said: Change = Stay()
        self._leaving: _Leaving | None = None
        self._is_quiet = False

    # ------------------------------------------------------------------ before a generation

    def choose(self, on_wait: Callable[[], None], *, step: int) -> int:
        """Chooses the number of hosts of the next generation, and tells the cluster which machines to avoid. Waits
        while there are too few.

        Args:
          on_wait: called at least once a second meanwhile; what it raises is passed on.
          step: step of the commit that the generation begins from, for messages.

        Raises:
          TooFewHosts: there were too few for longer than the run waits.
        """
        self._hosts, self._nodes, self._wanted, self._grows, self._said = (), (), None, 0, Stay()
        self._began_s = None
        if self._cluster is None:
            return self._scaling.least_hosts
        try:
            return self._choose(self._cluster, on_wait, step)
        finally:
            self._cluster.unask()

    def _choose(self, cluster: Cluster, on_wait: Callable[[], None], step: int) -> int:
        rules = cluster.rules()
        expected = self._leaving.wanted if self._leaving is not None else 0
        began_s, said_s, said = self._clock.monotonic_s(), -math.inf, ""
        while True:
            on_wait()
            nodes, resting, waited_s = (
                cluster.look(is_careful=True),
                self._resting(),
                self._clock.monotonic_s() - began_s,
            )
            decision: Use | Wait = Wait(
                found=0, needed=rules.least, avoid=frozenset(), why="the cluster does not answer"
            )
            if nodes is not None:
                decision = choose(nodes, rules, quarantined=resting)
                best = choose(nodes, rules, quarantined=resting, as_if_free=True)
                is_best = not isinstance(best, Use) or (isinstance(decision, Use) and _as_good(decision, best))
                is_less = isinstance(decision, Use) and decision.num_hosts < expected
                is_settled = (is_best and not is_less) or waited_s >= (SEEN_SETTLE_S if is_less else SETTLE_S)
                if isinstance(decision, Use) and is_settled:
                    self._nodes = nodes
                    self._begin(cluster, decision, rules)
                    self.num_hosts = decision.num_hosts
                    return self.num_hosts
            if isinstance(decision, Wait) and waited_s >= SAY_AFTER_S:
                cluster.ask(decision.needed, decision.avoid)
                if (decision.why != said and waited_s - said_s >= LOOK_S) or waited_s - said_s >= SAY_EVERY_S:
                    said_s, said = waited_s, decision.why
                    left_s = max(0.0, self._limits.wait_for_hosts_s - waited_s)
                    self._emit(HostsAwaited(needed=decision.needed, found=decision.why, step=step, left_s=left_s))
                if waited_s >= self._limits.wait_for_hosts_s:
                    raise TooFewHosts(gave_up(decision, cluster, step, waited_s=waited_s, because=self._rests_for))
            self._clock.sleep(WAIT_LOOK_S)

    def _begin(self, cluster: Cluster, decision: Use, rules: Rules) -> None:
        cluster.place(decision.avoid, has_own_machines=decision.has_own_machines, slices=decision.slices)
        if decision.avoid or decision.num_hosts < rules.most:
            self._emit(
                HostsChosen(num_hosts=decision.num_hosts, least=rules.least, most=rules.most, reason=decision.why)
            )

    def _resting(self) -> Mapping[FailureDomain, float]:
        return self._quarantine.resting(self._clock.monotonic_s())

    # ------------------------------------------------------------------ while a generation runs

    def began(self, handles: Sequence[HostHandles], *, generation: int) -> None:
        """A generation runs, with these hosts."""
        self._is_quiet, self._began_s = False, self._clock.monotonic_s()
        self._hosts = (None,) * len(handles)
        if self._cluster is not None:
            self._hosts = tuple(self._cluster.domain_of(pair.host) for pair in handles)
            self._cluster.began(handles)
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        change = HostsChange(
            generation=generation,
            step=leaving.step,
            before=leaving.before,
            after=len(handles),
            cause=leaving.cause,
            seconds=self._clock.monotonic_s() - leaving.began_s,
        )
        self.changes.append(change)
        self._emit(HostsChanged(change=change))

    def look(self) -> None:
        """Looks at the cluster, if the last look was long enough ago. Called whenever the driver waits.

        Raises:
          WorkerFailure: a machine goes before a commit can be made; its hosts are given up as lost.
        """
        if (
            self._cluster is None
            or not self._hosts
            or self._is_quiet
            or self._clock.monotonic_s() - self._looked_s < LOOK_S
        ):
            return
        self._looked_s = self._clock.monotonic_s()
        nodes = self._cluster.look()
        if nodes is None:
            return
        wanted = self._best_of(nodes)
        if self._is_growth(wanted):
            # Ray knows a machine that has just come up before its daemon listens, and hosts could not be placed there
            # yet.
            nodes = self._cluster.look(is_careful=True)
            if nodes is None:
                return
            wanted = self._best_of(nodes)
        self._nodes, self._wanted = nodes, wanted
        # A machine that has just come up may go at once; two looks must agree.
        self._grows = self._grows + 1 if self._is_growth(wanted) else 0
        change = self._change()
        if type(change) is not type(self._said):
            self._said = change
            self._say(change)
        if isinstance(change, LeaveNow):
            self._is_quiet = True
            raise WorkerFailure(
                [
                    Failure(worker=Worker("host", host), kind=FailureKind.HUNG, message=change.why, is_preemption=True)
                    for host in change.hosts
                ]
            )

    def _best_of(self, nodes: Sequence[Node]) -> Use | Wait | None:
        return choose(nodes, self._cluster.rules(), quarantined=self._resting()) if self._cluster else None

    def _is_growth(self, wanted: Use | Wait | None) -> bool:
        return isinstance(wanted, Use) and wanted.num_hosts > len(self._hosts)

    def paced(self, *, to_commit_s: float | None) -> None:
        """Notes how far the next commit of the schedule is, at each window's end; None if that is not known."""
        self._pace = replace(self._pace, to_commit_s=to_commit_s)

    def committed(self, seconds: float) -> None:
        """A commit was acknowledged so many seconds after its step."""
        self._pace = replace(self._pace, commit_s=seconds)

    def leaves(self, *, is_at_commit: bool) -> str | None:
        """Whether the generation should commit, unless it just did, and end here for other hosts: why, or None.

        Args:
          is_at_commit: a commit of the schedule has just begun.
        """
        match self._change():
            case LeaveAtCommit(why=why) if is_at_commit:
                return why
            case LeaveAfterWindow(why=why) | LeaveNow(why=why):
                return why
        return None

    def left(self, why: str, *, step: int) -> None:
        """The generation ends for it, with a commit: `look` is silent until the next one runs, and faults before and
        after make no row.
        """
        self._is_quiet = True
        self.budget = replace(self.budget, host_faults=0)
        self._leaving = _Leaving(
            cause=why,
            step=step,
            before=len(self._hosts),
            wanted=self._wanted.num_hosts if isinstance(self._wanted, Use) else 0,
            began_s=self._clock.monotonic_s(),
        )

    def _change(self) -> Change:
        if self._wanted is None or not self._hosts:
            return Stay()
        change = when_to_change(
            self._nodes, self._hosts, wanted=self._wanted, pace=self._pace, now_unix_s=self._clock.wall_s()
        )
        is_growth = isinstance(change, LeaveAtCommit) and not self._is_on_leaving_machine()
        return Stay() if is_growth and self._grows < 2 else change

    def _is_on_leaving_machine(self) -> bool:
        going = {node.domain for node in self._nodes if node.is_draining}
        return any(domain in going for domain in self._hosts)

    def _say(self, change: Change) -> None:
        match change:
            case LeaveAtCommit(why=why):
                self._emit(HostsWillChange(is_at_commit=True, reason=why))
            case LeaveAfterWindow(why=why):
                self._emit(HostsWillChange(is_at_commit=False, reason=why))

    # ------------------------------------------------------------------ after a fault

    def failed(self, failure: WorkerFailure, *, group: WorkerGroup | None, has_committed: bool) -> Recover:
        """The decision after a failure. Remembers it, and its machine.

        Args:
          group: group that failed; None while it started.
          has_committed: since the generation began.

        Raises:
          JobFailed, WorkerRefused, ConfigurationError, CrashLoop: another try would not help, or many did not.
        """
        if has_committed:
            self.budget = replace(self.budget, host_faults=0)
        self._leaving = None
        marked = self._marked(failure.failures)
        if group is not None:
            marked = marked_by_kernel(marked, self._cluster)
        decision = after_failure(
            marked,
            budget=self.budget,
            max_failures=self._limits.max_failures,
            max_user_errors=self._limits.max_user_errors,
            step=None if group is None or is_host_fault(marked) else _step_of(group),
            num_hosts=self.num_hosts,
            is_proven=group is None or group.is_proven,
        )
        if isinstance(decision, GiveUp):
            text = self._describe_plan(self.num_hosts)
            raise ending(decision, marked, max_failures=self._limits.max_failures, plan=text) from failure
        self.budget = decision.budget
        self._note(marked)
        self._hosts = ()
        return decision

    def _marked(self, failures: Sequence[Failure]) -> list[Failure]:
        """The failures, those of machines that were announced to go marked as such."""
        if self._cluster is None:
            return list(failures)
        nodes = self._cluster.look()
        seen = {node.id: node for node in (*self._nodes, *(nodes or ()))}
        announced = {node.domain for node in seen.values() if node.is_draining} | self._cluster.left()
        going = {host for host, domain in self._domains().items() if domain in announced}
        # The others notice the end of a connection, and their devices abort, long before the cluster says whose machine
        # it was.
        lost = [f for f in roots(failures) if f.kind is not FailureKind.PEER and f.worker and f.worker.is_host]
        has_other_root = any(_host_of(failure) not in going for failure in lost)
        if not going or has_other_root:
            return list(failures)
        own = (FailureKind.ERROR, FailureKind.DAMAGED)
        return [replace(one, is_preemption=one.kind not in own) for one in failures]

    def _note(self, failures: Sequence[Failure]) -> None:
        """Charges failure domains with the faults in them, and says which of them rest from now on."""
        now_s = self._clock.monotonic_s()
        lost = [
            failure for failure in roots(failures) if failure.kind is not FailureKind.PEER and not failure.is_preemption
        ]
        is_new, domains = self._began_s is None or now_s - self._began_s < EARLY_S, self._domains()
        first = {domains[f.worker.number]: f for f in reversed(lost) if f.worker and f.worker.number in domains}
        for domain, failure in first.items():
            is_early = is_new and is_of_chip(failure, self._scaling)
            self._quarantine = self._quarantine.noted(domain, now_s, is_early=is_early)
            left_s = self._quarantine.resting(now_s).get(domain)
            if left_s is None or len({node.domain for node in self._nodes}) <= 1:
                continue
            reason = RESTS_FOR
            if self._cluster is not None and self._quarantine.fails_early(domain):
                reason = no_device(failure, self._cluster)
                self._rests_for = f"{domain.label} rests: {reason}. Or "
            self._emit(MachineRests(machine=domain.label, seconds=left_s, reason=reason))

    def _domains(self) -> Mapping[int, FailureDomain]:
        """The domain of each host; while a generation starts, that in which it was put."""
        if self._hosts:
            return {host: domain for host, domain in enumerate(self._hosts) if domain is not None}
        return self._cluster.placed() if self._cluster is not None else {}


def _as_good(decision: Use, best: Use) -> bool:
    return decision.num_hosts >= best.num_hosts and decision.has_own_machines >= best.has_own_machines


def _step_of(group: WorkerGroup) -> int | None:
    """The step that the hosts were in."""
    return max((progress.step for progress in group.last_progress()), default=None)


def _host_of(failure: Failure) -> int | None:
    """Number of the host that a process belongs to."""
    return None if failure.worker is None else failure.worker.number


EARLY_FAULTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Failure domains in which hosts failed again and again, and until when they are not used.

    A value; it knows no clock.

    Attributes:
      after: faults within `period_s` after which a domain rests.
      first_s: how long at first; each further fault doubles it, up to `period_s`.
      faults: by domain, when its hosts failed, rising.
      early: by domain, when a device process there failed soon after its start, rising.
    """

    after: int
    first_s: float
    period_s: float
    faults: Mapping[FailureDomain, tuple[float, ...]] = field(default_factory=dict)
    early: Mapping[FailureDomain, tuple[float, ...]] = field(default_factory=dict)

    def noted(self, domain: FailureDomain, now_s: float, *, is_early: bool = False) -> Quarantine:
        """The same with one more fault; those older than the period are forgotten.

        Args:
          is_early: a device process failed soon after its start. A second one makes the domain rest for the whole
            period: what a machine lacks does not come back by itself.
        """
        recent = tuple(at for at in self.faults.get(domain, ()) if now_s - at < self.period_s)
        found = replace(self, faults={**self.faults, domain: (*recent, now_s)})
        if not is_early:
            return found
        before = tuple(at for at in self.early.get(domain, ()) if now_s - at < self.period_s)
        return replace(found, early={**self.early, domain: (*before, now_s)})

    def fails_early(self, domain: FailureDomain) -> bool:
        """Whether device processes there fail again and again soon after their start."""
        return len(self.early.get(domain, ())) >= EARLY_FAULTS

    def resting(self, now_s: float) -> dict[FailureDomain, float]:
        """Domains that are not to be used, and for how many seconds yet."""
        left = {domain: self._until_s(domain, times) - now_s for domain, times in self.faults.items()}
        return {domain: seconds for domain, seconds in left.items() if seconds > 0}

    def _until_s(self, domain: FailureDomain, times: tuple[float, ...]) -> float:
        if self.fails_early(domain):
            return self.early[domain][-1] + self.period_s
        if len(times) < self.after:
            return times[-1]
        return times[-1] + min(self.first_s * 2 ** (len(times) - self.after), self.period_s)
