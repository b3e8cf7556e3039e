"""One simulated run: real drivers over simulated workers and storage, a supervisor that starts drivers until the run is
done, the faults of a schedule, and the checks at the end.

`simulate` returns an `Outcome` or raises what the run broke; the same schedule gives the same history.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Recovery, Result
from podembed.orchestrator.api.run_errors import CrashLoop, JobFailed, WorkerFailure, WorkerRefused
from podembed.orchestrator.api.signals import StopSignals
from podembed.orchestrator.commit.holder import RunIsHeld
from podembed.orchestrator.commit.lease import Fenced
from podembed.orchestrator.commit.lease_files import read_claims, read_lineage
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.commit.run_record import RUN_FILE
from podembed.orchestrator.decisions.host_watch import Cluster, HostWatch
from podembed.orchestrator.driver.driver import Driver
from podembed.orchestrator.driver.publication import Answer
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.planning.recorded_plans import PlanRecord, plan_file
from podembed.orchestrator.run.run import OpenRun
from podembed.tools.fsck.check import check_run
from podembed.tools.fsck.findings import Finding
from podembed.workers.checkpoint.shard import read_dense
from podembed.workers.storage.records import encode
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from tests.simulation.backend import SELF_FENCE_S, RejoiningBackend, SimulatedBackend, SimulatedHandle
from tests.simulation.model import Model, the_model
from tests.simulation.pace import in_simulated_time, kept_results
from tests.simulation.schedule import Fault, Schedule
from tests.simulation.storage import ONE_SHOT, FaultyFiles, SharedFiles, SimulatedStore
from tests.simulation.witness import Violation, Witness
from tests.simulation.workers import Surroundings
from tests.simulation.world import EndlessSimulation, FakeClock, Fiber, Process, World

# Longest fake time of a run: the faults' own time, and for each of them the longest detection, back-off and recovery.
LONGEST_S = 3_000.0
RESTART_S = 2.0
RETRY_HELD_S = 10.0
MOST_DRIVERS = 30
LEAVES_AT_COMMIT = 0.15
LEAVES_BETWEEN = 0.04
# What a driver may end with because of faults. Anything else is a mistake of the code.
EXPECTED = (Fenced, RunIsHeld, JobFailed, CrashLoop, WorkerRefused, WorkerFailure, StorageError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a simulated run went.

    Attributes:
      struck: faults that did strike, by action.
      endings: of the drivers, by type.
      num_survivors: hosts that began a generation with rows of the one before; `buckets_kept` of them, and
        `buckets_wrong`, which were read; `buckets_moved` came from another host.
      most_lost_steps: largest loss of a recovery.
      seconds: simulated.
    """

    struck: Counter[str]
    endings: Counter[str]
    num_generations: int
    num_commits: int
    num_acknowledged: int
    num_deletions: int
    num_survivors: int
    buckets_kept: int
    buckets_wrong: int
    buckets_moved: int
    most_lost_steps: int
    seconds: float
    num_events: int
    log: tuple[str, ...]


class SimulatedPublisher:
    """Publishes in a fiber of the driver's process, so that it is killed and frozen with it."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._under_way: Future[Answer] | None = None
        self._waiting: Fiber | None = None

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        future: Future[Answer] = Future()

        def publish() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            if self._waiting is not None:
                self._waiting.wake()

        self._under_way = future
        self._world.fiber(self._process, publish)
        return future

    def wait(self, answer: Future[Answer], *, timeout_s: float | None = None) -> None:
        self._world.touch()
        if not answer.done() and self._world.current is not None:
            self._waiting = self._world.current
            self._waiting.block(timeout_s)
            self._waiting = None

    def close(self, *, timeout_s: float | None = None) -> bool:
        assert timeout_s is None, "nobody is impatient here"
        while self._under_way is not None and not self._under_way.done():
            self.wait(self._under_way)
        return True


class SimulatedReporter(SilentReporter):
    """Tells the witness what a user would see."""

    def __init__(self, witness: Witness, process: Process) -> None:
        self._witness = witness
        self._process = process

    def notice(self, text: str) -> None:
        self._witness.note(f"{self._process}: {text}")

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self._witness.acknowledge(self._process, name)

    def recovery(self, recovery: Recovery) -> None:
        self._witness.note(f"{self._process} recovered: {recovery}")


@dataclass(slots=True, eq=False)
class DriverLife:
    """One driver process. Mutated: `result`, `error` and `is_over`, when it ends."""

    process: Process
    clock: FakeClock
    backend: SimulatedBackend
    stop: StopSignals
    is_rival: bool
    result: Result | None = None
    error: BaseException | None = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Simulation:
    """A run and its faults. Used once.

    Attributes:
      plans: that the run recorded before.
    """

    schedule: Schedule
    keeps_log: bool = False
    plans: tuple[PlanRecord, ...] = ()
    model: Model = field(default_factory=the_model)
    world: World = field(init=False)
    shared: SharedFiles = field(init=False)
    witness: Witness = field(init=False)
    _around: Surroundings = field(init=False)
    _noise: random.Random = field(init=False)
    _lives: list[DriverLife] = field(default_factory=list)
    _waiting: list[Fault] = field(default_factory=list)
    _visits: Counter[str] = field(default_factory=Counter)
    _struck: Counter[str] = field(default_factory=Counter)
    _is_done: bool = False
    _num_held: int = 0

    def __post_init__(self) -> None:
        schedule = self.schedule
        self._noise = random.Random(schedule.noise)
        self.world = World(longest_s=LONGEST_S)
        self.shared = SharedFiles()
        # One interval is being done, another one is being written; and of saves that the storage fails, three are
        # borne.
        most_lost_steps = (5 if schedule.has_storage_faults else 2) * schedule.every_steps
        self.witness = Witness(
            self.world, self.shared, self.model, most_lost_steps=most_lost_steps, keeps_log=self.keeps_log
        )
        self._around = Surroundings(
            world=self.world,
            model=self.model,
            noise=self._noise,
            store_of=self._store_of,
            reached=self._reached,
            applied=self.witness.applied,
            violated=self.witness.violated,
            survived=self.witness.survived,
            undo_bytes=schedule.undo_bytes,
            buffer_bytes=schedule.buffer_bytes,
        )
        self._waiting = [fault for fault in schedule.faults if fault.point]
        self.shared.files[RUN_FILE] = encode(self.model.record)
        for plan in self.plans:
            self.shared.files[plan_file(plan.step, plan.num_hosts)] = encode(plan)

    def run(self) -> Outcome:
        """Raises:
        Violation: an invariant does not hold.
        Exception: a driver ended with something that no fault explains.
        """
        for fault in self.schedule.faults:
            if not fault.point:
                self.world.at(fault.at_s, partial(self._strike, fault, None))
        self.world.at(0.0, self._start_driver)
        try:
            self.world.run()
        except EndlessSimulation as error:
            raise Violation("I11", f"the run {error}") from error
        self._check_end()
        witness = self.witness
        return Outcome(
            struck=self._struck,
            endings=Counter(type(life.error).__name__ if life.error else "done" for life in self._lives),
            num_generations=witness.counts["generations"],
            num_commits=len(witness.commits),
            num_acknowledged=len(witness.acknowledged),
            num_deletions=witness.counts["deletions"],
            num_survivors=witness.counts["survivors"],
            buckets_kept=witness.counts["buckets kept"],
            buckets_wrong=witness.counts["buckets wrong"],
            buckets_moved=witness.counts["buckets moved"],
            most_lost_steps=max(witness.lost_steps, default=0),
            seconds=self.world.now_s,
            num_events=self.world.num_events,
            log=tuple(witness.log),
        )

    def _store_of(self, process: Process, clock: FakeClock) -> Store:
        files = FaultyFiles(
            self.shared,
            world=self.world,
            process=process,
            watcher=self,
            noise=self._noise,
            repeats_requests=self.schedule.repeats_requests,
        )
        return SimulatedStore(files, clock=clock, noise=self._noise)

    # ------------------------------------------------------------------ drivers

    def _start_driver(self, *, is_rival: bool = False, take_over: bool = False) -> None:
        """A driver starts. The supervisor's are attempts of one submission, which wait for nobody; a rival is somebody
        else's.
        """
        number = len(self._lives)
        if number >= MOST_DRIVERS:
            self.witness.violated("I11", f"{number} drivers were started and the run is not done")
            return
        process = self.world.process("driver", f"driver {number}")
        clock = FakeClock(self.world)
        backend = self._backend(process, clock)
        life = DriverLife(process=process, clock=clock, backend=backend, stop=StopSignals(), is_rival=is_rival)
        self._lives.append(life)
        process.at_death(partial(self._ended, life))
        run = OpenRun(
            url=FaultyFiles.location,
            store=self._store_of(process, clock),
            record=self.model.record,
            job=self.model.job,
            reference=None,
            train_index=self.model.index,
            eval_index=None,
            take_over=take_over,
            submission=f"rival {number}" if is_rival else "supervised",
        )
        num_hosts = self.schedule.hosts[number % len(self.schedule.hosts)]
        self.witness.note(f"{process} starts with {num_hosts} hosts{' as a rival' if is_rival else ''}")
        self.world.fiber(process, partial(self._drive, life, run, num_hosts))

    def _backend(self, process: Process, clock: FakeClock) -> SimulatedBackend:
        kind = RejoiningBackend if self.schedule.keeps_hosts else SimulatedBackend
        return kind(process, clock, self._around)

    def _scaling(self, num_hosts: int) -> ScalingConfig:
        return ScalingConfig(num_hosts=num_hosts, plan="auto" if self.plans else "rule")

    def _cluster(self, backend: SimulatedBackend) -> Cluster | None:
        """There is none: see `_change_hosts`."""
        return None

    def _drive(self, life: DriverLife, run: OpenRun, num_hosts: int) -> None:
        schedule = self.schedule
        config = RunConfig(
            name="run",
            evaluate_at_end=False,
            checkpoint_config=CheckpointConfig(
                every_steps=schedule.every_steps,
                num_to_keep=schedule.num_to_keep,
                keep_every_steps=schedule.keep_every_steps,
                read_back=schedule.read_back,
                full_every=schedule.full_every,
            ),
            failure_config=FailureConfig(step_timeout_s=20.0, start_timeout_s=60.0),
        )
        try:
            driver = Driver(
                run,
                scaling=self._scaling(num_hosts),
                config=config,
                backend=life.backend,
                cluster=self._cluster(life.backend),
                reporter=SimulatedReporter(self.witness, life.process),
                stop=life.stop,
                clock=life.clock,
                publisher=partial(SimulatedPublisher, self.world, life.process),
            )
            if schedule.changes_hosts:
                self._change_hosts(driver.shared.watch, self._lives.index(life))
            life.result = driver.run()
        except EXPECTED as error:
            life.error = error
        self.witness.note(f"{life.process} ended: {life.error or life.result}")
        self._check_ending(life)
        self._ended(life)
        life.process.kill()

    def _change_hosts(self, watch: HostWatch, number: int) -> None:
        """In place of what a cluster says: the numbers of hosts of a driver's generations, and that some end in order
        for another number.
        """
        hosts, real = itertools.cycle(self.schedule.hosts[number:] + self.schedule.hosts[:number]), watch.choose

        def choose(on_wait: Callable[[], None], *, step: int) -> int:
            real(on_wait, step=step)
            on_wait()
            watch.num_hosts = next(hosts)
            return watch.num_hosts

        def leaves(*, is_at_commit: bool) -> str | None:
            chance = LEAVES_AT_COMMIT if is_at_commit else LEAVES_BETWEEN
            return "other machines are there" if self._noise.random() < chance else None

        watch.choose, watch.leaves = choose, leaves  # type: ignore[method-assign]

    def _check_ending(self, life: DriverLife) -> None:
        commit = life.result and life.result.commit
        if commit and commit not in self.witness.lineage(self.witness.head()):
            self.witness.violated("I3", f"{life.process} ended with {commit}, which is not in the lineage")
        handles = [handle for pair in life.backend.handles for handle in (pair.host, pair.device)]
        left: list[Any] = [h for h in handles if h.process.is_alive and h.process not in life.backend.abandoned]  # type: ignore[attr-defined]
        if left:
            self.witness.violated("I18", f"{life.process} ended and left {left[0].process} alive")

    def _ended(self, life: DriverLife) -> None:
        """The supervisor sees a driver go, and starts another one unless the run is done or somebody else is at
        work.
        """
        if life.is_over:
            return
        life.is_over = True
        result = life.result
        if result is not None and result.step == result.total_steps:
            self._is_done = True
        self._num_held = self._num_held + 1 if isinstance(life.error, RunIsHeld) else 0
        wait_s = RETRY_HELD_S if isinstance(life.error, RunIsHeld | StorageError) else RESTART_S
        self.world.after(wait_s, self._look_after)

    def _look_after(self) -> None:
        is_driven = any(not life.is_over and not life.process.is_frozen for life in self._lives)
        if not self._is_done and not is_driven:
            # Somebody who is told often enough that the run is held decides to take it over.
            self._start_driver(take_over=self._num_held >= 3)

    # ------------------------------------------------------------------ faults

    def created(self, process: Process, name: str, data: bytes, *, is_whole: bool) -> None:
        self.witness.created(process, name, data, is_whole=is_whole)

    def deleted(self, process: Process, name: str) -> None:
        self.witness.deleted(process, name)

    def reached(self, process: Process, point: str) -> None:
        self._reached(process, point)

    def _reached(self, process: Process, point: str) -> None:
        """A process is at a point: the faults that wait there strike."""
        self.world.touch()
        self._visits[point] += 1
        for fault in [fault for fault in self._waiting if fault.point == point and fault.nth == self._visits[point]]:
            self._waiting.remove(fault)
            self._strike(fault, process)
        self.world.touch()
        if process.is_frozen:
            self.world.sleep(0.0)

    def _strike(self, fault: Fault, process: Process | None) -> None:
        """Args:
        process: that is at the fault's point; None at a time.
        """
        world, weather, now_s = self.world, self.shared.weather, self.world.now_s
        life = self._life(process, fault.which)
        pairs = life.backend.handles if life else []
        # One that lived on is in several generations; the newest counts.
        newest = {pair.host.process: pair for pair in pairs if pair.host.process.is_alive}  # type: ignore[attr-defined]
        handles = [*newest.values()]
        pair = handles[fault.which % len(handles)] if handles else None
        if process is None and life is not None:
            process = life.process
            if fault.target != "driver" and pair is not None:
                handle: Any = pair.host if fault.target == "host" else pair.device
                process = handle.process
        self.witness.note(f"FAULT {fault}: {process}")
        strikes = True
        if fault.action in ONE_SHOT:
            weather.armed.append(fault.action)
        elif fault.action == "storage down":
            weather.down_until_s = max(weather.down_until_s, now_s + fault.seconds)
        elif fault.action == "storage slow":
            weather.slow_until_s = max(weather.slow_until_s, now_s + fault.seconds)
        elif fault.action == "storage full":
            weather.full_until_s = max(weather.full_until_s, now_s + fault.seconds)
        elif fault.action == "stale listing":
            weather.stale_until_s, weather.stale_data = now_s + fault.seconds, self.shared.sizes("data")
        elif fault.action in ("rival", "polite rival"):
            world.after(0.0, partial(self._start_driver, is_rival=True, take_over=fault.action == "rival"))
        elif process is None or life is None:
            strikes = False
        elif fault.action == "kill":
            process.kill()
        elif fault.action == "freeze":
            process.freeze(fault.seconds)
            if process is life.process:
                world.after(self.schedule.successor_s, self._look_after)
                if self.schedule.self_fencing and fault.seconds > SELF_FENCE_S:
                    world.after(SELF_FENCE_S, life.backend.fence)
        elif fault.action == "clock jump":
            life.clock.jump_s += fault.seconds
        elif fault.action == "stop":
            life.stop.request("a simulated SIGTERM")
        elif fault.action == "cut mesh" and life.backend.meshes:
            life.backend.meshes[-1].heals_s = now_s + fault.seconds
        elif fault.action == "cut link" and isinstance(pair and pair.host, SimulatedHandle):
            pair.host.link.cut(fault.seconds)  # type: ignore[union-attr]
        elif fault.action == "spoil row" and pair is not None:
            pair.host.target.spoils_row = True  # type: ignore[attr-defined]
        elif fault.action == "slow host" and pair is not None:
            host = pair.host.target  # type: ignore[attr-defined]
            host.slowness = 10.0
            world.after(fault.seconds, partial(setattr, host, "slowness", 1.0))
        else:
            strikes = False
        self._struck[fault.action] += strikes

    def _life(self, process: Process | None, which: int) -> DriverLife | None:
        """The driver that a process belongs to; for none, one of those that live, the oldest first."""
        if process is not None:
            for life in self._lives:
                own = [life.process, *(h.process for pair in life.backend.handles for h in (pair.host, pair.device))]  # type: ignore[attr-defined]
                if process in own:
                    return life
        living = [life for life in self._lives if not life.is_over]
        return living[which % len(living)] if living else None

    # ------------------------------------------------------------------ the end

    def _check_end(self) -> None:
        """What a reader that was not there finds."""
        witness, model = self.witness, self.model
        store = SimulatedStore(
            FaultyFiles(self.shared, world=self.world), clock=FakeClock(self.world), noise=random.Random(0)
        )
        lineage = witness.lineage(witness.head())
        if not self._is_done or not lineage or witness.commits[lineage[0]].manifest.step != model.num_steps:
            raise Violation("I11", f"the run ended at {lineage[:1]} of {model.num_steps} steps")
        lost = [name for name in witness.acknowledged if name not in lineage]
        if lost:
            raise Violation("I3", f"{lost[0]} was acknowledged and is not in the lineage")
        findings = [finding for finding in check_run(store).all_findings if not self._is_unfinished_deletion(finding)]
        if findings:
            raise Violation("I1", f"a reader finds {findings[0]}")
        found = read_lineage(store)
        if list(found[:1]) != lineage[:1] or not set(found) <= set(lineage):
            raise Violation("I2", f"a reader finds the lineage {found}, which is {lineage}")
        if read_claims(store) != sorted(witness.claims) or sorted(witness.claims) != [
            *range(1, len(witness.claims) + 1)
        ]:
            raise Violation("I2", f"claims are {sorted(witness.claims)}")
        steps = [witness.commits[name].manifest.step for name in reversed(lineage)]
        if steps != sorted(steps):
            raise Violation("I2", f"steps along the lineage are {steps}")
        self._check_final_state(store, witness.commits[lineage[0]].manifest)
        self._check_results()

    def _is_unfinished_deletion(self, finding: Finding) -> bool:
        """A commit between two kept ones, whose manifest a keep policy deleted and whose files it could not delete any
        more: `check_run` cannot tell it from a manifest that somebody lost, but the witness saw who deleted it.
        """
        parent = self.witness.commits[finding.commit].parent if finding.commit else None
        return finding.place == "the chain of commits" and f"commit/{parent}.json" in self.witness.deleted_files

    def _check_final_state(self, store: Store, head: Manifest) -> None:
        """I9: every byte of the dense state; the tables' digests were compared when it was published, and their files
        by the reader.
        """
        (dense,) = read_dense(store, head.dense).values()
        if dense.tobytes() != self.model.dense(head.step):
            raise Violation("I9", f"the dense state of {head.name} is not that after {head.step} steps")
        audit, _ = self.model.state(head.step)
        epochs = self.model.job.num_epochs
        if not (audit[0][:, 0] == epochs).all():
            raise Violation("I5", f"samples were trained {sorted(set(audit[0][:, 0]))} times in {epochs} epochs")

    def _check_results(self) -> None:
        """I12: what a driver says that it trained is what its lineage holds beyond where it began."""
        for life in self._lives:
            result = life.result
            if result is not None and result.recoveries == () and result.commit is not None:
                trained = self.model.samples_after[result.step]
                if result.num_samples > trained:
                    raise Violation("I12", f"{life.process} counts {result.num_samples} samples of {trained}")


def simulate(schedule: Schedule, *, keeps_log: bool = False) -> Outcome:
    """Carries out a schedule.

    Raises:
      Violation: an invariant does not hold; or whatever unexpected error a driver ended with.
    """
    return carried_out(Simulation(schedule=schedule, keeps_log=keeps_log))


def carried_out(simulation: Simulation) -> Outcome:
    """As `simulate`."""
    try:
        with kept_results(), in_simulated_time(simulation.world, undo_bytes=simulation.schedule.undo_bytes):
            return simulation.run()
    except BaseException as error:
        with contextlib.suppress(AttributeError):
            error.add_note("\n".join(simulation.witness.log))
        raise
