"""`HostWatch`: what the driver knows of the machines under its run. It looks at the cluster every few seconds,
remembers what failed where, and asks the pure functions of `orchestrator.decisions.membership` how many hosts there
should be and when they change.

It starts and stops nothing and is used by the driver's thread only. Without a cluster (one host in the driver's
process) it always wants the same number. What it remembers is lost with the driver; nothing that matters hangs on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import FailureConfig, HostsChange, ScalingConfig
from podembed.orchestrator.api.errors import Failure, FailureKind, TooFewHosts, WorkerFailure, is_host_fault, roots
from podembed.orchestrator.decisions.failure import Budget, GiveUp, Recover, after_failure, ending
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
    choose_hosts,
    when_to_change,
)
from podembed.orchestrator.decisions.quarantine import Quarantine
from podembed.orchestrator.group.worker_group import Handle, HostHandles, WorkerGroup
from podembed.workers.liveness.worker import Worker

LOOK_S = 3.0  # between two looks at the cluster while a generation runs
WAIT_LOOK_S = 0.5  # while hosts are waited for
SETTLE_S = 5.0  # what a run gave back is counted as free again after a moment
SEEN_SETTLE_S = (
    15.0  # the same where the generation ended for machines that were there: with fewer hosts it ended for nothing
)
SAY_AFTER_S = 2.0
SAY_EVERY_S = 60.0
FIRST_COMMIT_S = 5.0  # taken for the time of a commit before there was one


class Cluster(Protocol):
    """The machines, as far as a run cares."""

    def look(self, *, is_careful: bool = False) -> Sequence[Node] | None:
        """Live machines, or None where the cluster does not answer; if asked to be careful, each is tried, which takes
        longer.
        """
        ...

    def left(self) -> frozenset[str]:
        """Machines that have left as they were announced or told to, at the last look."""
        ...

    def rules(self) -> Rules:
        """What is asked of it."""
        ...

    def place(self, avoid: frozenset[str], *, has_own_machines: bool) -> None:
        """How the next hosts are placed: off these machines, and whether each has one for itself."""
        ...

    def machine_of(self, handle: Handle) -> str | None:
        """The machine that a process is on."""
        ...

    def began(self, handles: Sequence[HostHandles]) -> None:
        """A generation runs with these hosts."""
        ...

    def killed_for_memory(self, workers: Collection[Worker]) -> set[Worker]:
        """Those of these dead processes that the kernel may have killed for want of memory."""
        ...

    def placed(self) -> Mapping[int, str]:
        """By host, the machine on which it was put last."""
        ...

    def ask(self, num_hosts: int, avoid: frozenset[str]) -> None:
        """Says that so many hosts are wanted, off these machines, so that a cluster that grows by demand grows."""
        ...

    def unask(self) -> None:
        """Takes that back."""
        ...


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
      notice: told about decisions.
      describe_plan: what the plan for so many hosts puts on each, in a sentence without its full stop.
      clock: time, replaced in tests.

    Attributes:
      changes: planned changes of hosts so far.
      budget: what went wrong so far.
      num_hosts: of the generation that was chosen last.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        *,
        scaling: ScalingConfig,
        limits: FailureConfig,
        notice: Callable[[str], None],
        describe_plan: Callable[[int], str] = lambda num_hosts: "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.changes: list[HostsChange] = []
        self.budget = Budget()
        self.num_hosts = scaling.least_hosts
        self._cluster = cluster
        self._scaling = scaling
        self._limits = limits
        self._notice = notice
        self._describe_plan = describe_plan
        self._clock = clock
        self._quarantine = Quarantine(
            after=limits.quarantine_after, first_s=limits.quarantine_s, period_s=limits.quarantine_period_s
        )
        self._hosts: tuple[str | None, ...] = ()
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
        """How many hosts the next generation has; tells the cluster which machines to avoid. Waits while there are too
        few.

        Args:
          on_wait: called at least once a second meanwhile; what it raises is passed on.
          step: of the commit that the generation begins from, for messages.

        Raises:
          TooFewHosts: there were too few for longer than the run waits.
        """
        self._hosts, self._nodes, self._wanted, self._grows, self._said = (), (), None, 0, Stay()
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
                decision = choose_hosts(nodes, rules, quarantined=resting)
                best = choose_hosts(nodes, rules, quarantined=resting, as_if_free=True)
                is_best = not isinstance(best, Use) or (isinstance(decision, Use) and _as_good(decision, best))
                is_less = isinstance(decision, Use) and decision.num_hosts < expected
                is_settled = (is_best and not is_less) or waited_s >= (SEEN_SETTLE_S if is_less else SETTLE_S)
                if isinstance(decision, Use) and is_settled:
                    self._begin(cluster, decision, rules)
                    self.num_hosts = decision.num_hosts
                    return self.num_hosts
            if isinstance(decision, Wait) and waited_s >= SAY_AFTER_S:
                cluster.ask(decision.needed, decision.avoid)
                if (decision.why != said and waited_s - said_s >= LOOK_S) or waited_s - said_s >= SAY_EVERY_S:
                    said_s, said = waited_s, decision.why
                    self._notice(self._waiting(decision, step, waited_s))
                if waited_s >= self._limits.wait_for_hosts_s:
                    raise TooFewHosts(self._gave_up(decision, step, waited_s))
            self._clock.sleep(WAIT_LOOK_S)

    def _begin(self, cluster: Cluster, decision: Use, rules: Rules) -> None:
        cluster.place(decision.avoid, has_own_machines=decision.has_own_machines)
        if decision.avoid or decision.num_hosts < rules.most:
            self._notice(f"{_hosts(decision.num_hosts)} of {_asked(rules)}: {decision.why}")

    def _waiting(self, decision: Wait, step: int, waited_s: float) -> str:
        left_s = max(0.0, self._limits.wait_for_hosts_s - waited_s)
        return (
            f"waiting for hosts: {decision.needed} needed, found {decision.why}. Everything up to step {step} is "
            "committed; the run goes on "
            f"as soon as there are enough, and ends in {left_s:.0f} s if there are not"
        )

    def _gave_up(self, decision: Wait, step: int, waited_s: float) -> str:
        return (
            f"Found {decision.why}, for {waited_s:.0f} s. Expected room for at least {_hosts(decision.needed)} with "
            f"{_amounts(self._cluster)} "
            f"each. The state is intact at step {step}: add machines, then `podembed resume` goes on; or lower the "
            "minimum (--hosts MIN-MAX)."
        )

    def _resting(self) -> Mapping[str, float]:
        return self._quarantine.resting(self._clock.monotonic_s())

    # ------------------------------------------------------------------ while a generation runs

    def began(self, handles: Sequence[HostHandles], *, generation: int) -> None:
        """A generation runs, with these hosts."""
        self._is_quiet = False
        self._hosts = (None,) * len(handles)
        if self._cluster is not None:
            self._hosts = tuple(self._cluster.machine_of(pair.host) for pair in handles)
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
        self._notice(
            f"hosts changed from {change.before} to {change.after} at step {change.step} in {change.seconds:.1f} s: "
            f"{change.cause}"
        )

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
        return choose_hosts(nodes, self._cluster.rules(), quarantined=self._resting()) if self._cluster else None

    def _is_growth(self, wanted: Use | Wait | None) -> bool:
        return isinstance(wanted, Use) and wanted.num_hosts > len(self._hosts)

    def paced(self, *, to_commit_s: float | None) -> None:
        """How far the next commit of the schedule is, told at each window's end; None if that is not known."""
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
        going = {node.id for node in self._nodes if node.is_draining}
        return any(machine in going for machine in self._hosts)

    def _say(self, change: Change) -> None:
        match change:
            case LeaveAtCommit(why=why):
                self._notice(f"hosts change at the next commit: {why}")
            case LeaveAfterWindow(why=why):
                self._notice(f"hosts change after this window, which is committed: {why}")

    # ------------------------------------------------------------------ after a fault

    def failed(self, failure: WorkerFailure, *, group: WorkerGroup | None, has_committed: bool) -> Recover:
        """What to do after a failure. Remembers it, and which machine it was on.

        Args:
          group: that failed; None while it started.
          has_committed: since the generation began.

        Raises:
          JobFailed, WorkerRefused, ConfigurationError, CrashLoop: trying again would not help, or was tried often
          enough.
        """
        if has_committed:
            self.budget = replace(self.budget, host_faults=0)
        self._leaving = None
        marked = self._marked(failure.failures)
        if group is not None:
            marked = self._marked_by_kernel(marked)
        decision = after_failure(
            marked,
            budget=self.budget,
            max_failures=self._limits.max_failures,
            max_user_errors=self._limits.max_user_errors,
            step=None if group is None or is_host_fault(marked) else _step_of(group),
            num_hosts=self.num_hosts,
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
        announced = {node.id for node in seen.values() if node.is_draining} | self._cluster.left()
        going = {host for host, machine in self._machines().items() if machine in announced}
        # The others notice the end of a connection, and their devices abort, long before the cluster says whose machine
        # it was.
        lost = [f for f in roots(failures) if f.kind is not FailureKind.PEER and f.worker and f.worker.is_host]
        has_other_root = any(_host_of(failure) not in going for failure in lost)
        if not going or has_other_root:
            return list(failures)
        return [replace(failure, is_preemption=failure.kind is not FailureKind.ERROR) for failure in failures]

    def _marked_by_kernel(self, failures: Sequence[Failure]) -> list[Failure]:
        """The failures, those of processes that the kernel killed for want of memory marked as such."""
        died = {
            f.worker
            for f in roots(failures)
            if f.worker and f.kind is FailureKind.DIED and not f.is_preemption and not f.memory
        }
        killed = self._cluster.killed_for_memory(died) if self._cluster is not None and died else set()
        return [
            replace(failure, memory="host", message=f"killed by the kernel for want of memory ({failure.message})")
            if failure.worker in killed
            else failure
            for failure in failures
        ]

    def _note(self, failures: Sequence[Failure]) -> None:
        """Charges machines with the faults on them, and says which of them rest from now on."""
        now_s = self._clock.monotonic_s()
        lost = [
            failure for failure in roots(failures) if failure.kind is not FailureKind.PEER and not failure.is_preemption
        ]
        hosts, machines = {_host_of(failure) for failure in lost}, self._machines()
        for machine in {machine for host, machine in machines.items() if host in hosts}:
            self._quarantine = self._quarantine.noted(machine, now_s)
            left_s = self._quarantine.resting(now_s).get(machine)
            if left_s is not None and len(self._nodes) > 1:
                label = next((node.label for node in self._nodes if node.id == machine), machine[:8])
                self._notice(f"{label} is not used for {left_s:.0f} s: hosts failed on it again and again")

    def _machines(self) -> Mapping[int, str]:
        """By host, the machine that it is on; while a generation starts, that on which it was put."""
        if self._hosts:
            return {host: machine for host, machine in enumerate(self._hosts) if machine is not None}
        return self._cluster.placed() if self._cluster is not None else {}


def _as_good(decision: Use, best: Use) -> bool:
    return decision.num_hosts >= best.num_hosts and decision.has_own_machines >= best.has_own_machines


def _step_of(group: WorkerGroup) -> int | None:
    """The step that the hosts were in."""
    return max((progress.step for progress in group.last_progress()), default=None)


def _host_of(failure: Failure) -> int | None:
    """Number of the host that a process belongs to."""
    return None if failure.worker is None else failure.worker.number


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"


def _asked(rules: Rules) -> str:
    return _hosts(rules.most) if rules.least == rules.most else f"{rules.least} to {_hosts(rules.most)}"


def _amounts(cluster: Cluster | None) -> str:
    resources = cluster.rules().resources if cluster is not None else {}
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
