"""What `podembed chaos` does to a run: schedules of faults, each with what must come of it. Values and pure functions.

The curated list goes through the faults of docs/faults.md by their numbers; random schedules are drawn from what a run
must survive without a trace. A schedule fits a run of so many hosts and steps with commits at regular steps. So its
faults meet the places that they mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from podembed.workers.faults.plan import Fault
from podembed.workers.liveness.worker import Worker

# More than a run ever begins.
EVERY_GENERATION = 99
DONE = frozenset({0})
# Phases of a step that every host passes in every step, by the name that the list of faults gives them.
PHASES: Mapping[str, tuple[str, ...]] = {
    "P0 read": ("step.read",),
    "P2 dedup": ("step.dedup",),
    "P3 id exchange": ("step.id_exchange",),
    "P4 gather": ("step.gather",),
    "P5 row exchange": ("step.row_exchange", "step.activation_exchange"),
    "P6 to device": ("step.device",),
    "P8 gradient exchange": ("step.gradient_exchange",),
    "P9 apply": ("step.update", "step.update.between", "step.update.mid"),
    "P10 done": ("step.done", "step.end_of_window"),
}
DEVICE_POINTS = ("device.step", "device.gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The run that faults are planned for: `num_hosts` hosts, `num_steps` steps, a commit every `commit_every`."""

    num_hosts: int = 2
    num_steps: int = 60
    commit_every: int = 10

    def step_after(self, commits: int, offset: int = 3) -> int:
        """A step that many commits are behind of, in the middle of an interval."""
        return min(commits * self.commit_every + offset, self.num_steps - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Faults of one round, and what must come of them.

    Attributes:
      number: in docs/faults.md, such as `F6`; `random` for drawn ones.
      label: its own name: `F6.3` is the third of F6; `seed 17` for a drawn one.
      title: what happens, one line.
      exit_codes: how the supervised run may end; 0 is the end of all steps.
      says: words, each of which must be found in what the run told its user.
      flags: further flags of `train`.
      settings: arguments of the job that differ from the undisturbed run, which is then no measure for bytes.
      compares: `bytes` with the undisturbed run, or `samples` alone, where another number of hosts sums in another
        order.
      hosts_after: a planned change: the run goes on with so many hosts after it was stopped.
      rival: a second driver that comes when the first fault strikes: one that asks, or one that takes over.
      damages: the fault spoils what is committed, without anybody noticing; `fsck` must find it.
      detect_s, recover_s: longest times for this schedule; None takes those of the campaign, infinity sets none.
    """

    number: str
    title: str
    faults: tuple[Fault, ...]
    exit_codes: frozenset[int] = DONE
    says: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    compares: Literal["bytes", "samples"] = "bytes"
    hosts_after: int | None = None
    rival: Literal["asks", "takes_over"] | None = None
    detect_s: float | None = None
    recover_s: float | None = None
    damages: bool = False
    label: str = ""

    @property
    def needs_hosts(self) -> bool:
        """Whether it means nothing for one host in the driver's own process: a driver that survives its workers, other
        hosts, frames.
        """
        points = {fault.point for fault in self.faults}
        return self.hosts_after is not None or bool(
            points & {"driver.fault", "driver.recovered", "mesh.send", "step.undo"}
        )

    @property
    def is_finished(self) -> bool:
        """Whether the run must train all its steps."""
        return self.exit_codes == DONE


def kill(point: str, rank: str | None = None, **more: Any) -> Fault:
    """The end of a process at a point; `more` as in `Fault`."""
    return Fault(point=point, action="kill", rank=rank, **more)


def curated(shape: RunShape) -> list[Schedule]:
    """Every schedule of the curated list, in the order of the faults' numbers, with its label."""
    parts: tuple[Callable[[RunShape], list[Schedule]], ...] = (
        _killed_in_a_step,
        _killed_together,
        _frozen_or_slow,
        _killed_while_saving,
        _killed_while_restoring,
        _driver_killed,
        _frames,
        _storage_that_fails,
        _storage_that_lies,
        _memory_and_values,
        _signals_and_sizes,
    )
    found: list[Schedule] = []
    for schedule in (schedule for part in parts for schedule in part(shape)):
        place = 1 + sum(before.number == schedule.number for before in found)
        found.append(replace(schedule, label=f"{schedule.number}.{place}"))
    return found


def _killed_in_a_step(shape: RunShape) -> list[Schedule]:
    """F1. Several kills a round, each after another commit, so that a round's start is paid once."""
    last = shape.num_hosts - 1
    points = [(phase, point) for phase, names in PHASES.items() for point in names]
    kills = [(phase, kill(point, str(Worker("host", last)))) for phase, point in points]
    kills += [("P7 device", kill(point, str(Worker("device", last)))) for point in DEVICE_POINTS]
    schedules = []
    for first in range(0, len(kills), 3):
        group = kills[first : first + 3]
        faults = tuple(
            _at(fault, shape.step_after(1 + at)) if fault.point != "step.end_of_window" else fault
            for at, (_, fault) in enumerate(group)
        )
        phases = ", ".join(dict.fromkeys(phase for phase, _ in group))
        schedules.append(Schedule(number="F1", title=f"killed in {phases}", faults=faults))
    return schedules


def _killed_together(shape: RunShape) -> list[Schedule]:
    step, hosts = shape.step_after(2), range(shape.num_hosts)
    pair = (
        kill("step.update", "host 0", step=step),
        kill("device.step", str(Worker("device", shape.num_hosts - 1)), step=step),
    )
    everyone = tuple(kill("step.gradient_exchange", str(Worker("host", host)), step=step) for host in hosts)
    first = kill("step.update", "host 0", step=step)
    last = shape.num_hosts - 1
    return [
        Schedule(number="F2", title="a host and another host's device killed together", faults=pair),
        Schedule(number="F2", title="all hosts killed together", faults=everyone),
        Schedule(
            number="F3",
            title="a host killed as it restores, in the recovery of another",
            faults=(first, kill("restore.file", str(Worker("host", last)), after=0)),
        ),
        Schedule(
            number="F3",
            title="a device killed as it starts, in the recovery of a host",
            faults=(first, kill("start.ready", str(Worker("device", last)), after=0)),
        ),
        Schedule(
            number="F3",
            title="a host that lived on killed as it goes back in memory, in the recovery of another",
            faults=(first, kill("step.undo", str(Worker("host", last)), after=0)),
        ),
    ]


def _frozen_or_slow(shape: RunShape) -> list[Schedule]:
    step, is_alone = shape.step_after(2), shape.num_hosts == 1
    cases = [("host", "step.gather", "a host frozen in gather"), ("device", "device.step", "a device frozen")]
    found = [
        Schedule(
            number="F4",
            title=f"{title}, woken 60 s later",
            faults=(Fault(point=point, action="stop", rank=f"{kind} 0", step=step, arguments={"wake_s": 60}),),
            # In one process the driver is frozen, too, and found by its supervisor.
            detect_s=60.0 if is_alone else None,
            recover_s=180.0,
        )
        for kind, point, title in cases
    ]
    if not is_alone:
        # A host is slow in comparison with others.
        # In more windows than the three after which it is named: they end at commits, and before it after 2 s.
        times = 2 * shape.commit_every + 6
        slow = Fault(
            point="step.gather", action="delay", rank="host 0", times=times, nth=12, arguments={"seconds": 0.4}
        )
        title = f"a host ten times slower in gather for {times} steps"
        found.append(Schedule(number="F5", title=title, faults=(slow,), says=("host 0", "gather")))
    return found


def _killed_while_saving(shape: RunShape) -> list[Schedule]:
    """F6 and F7. Commits are named by their step, so a fault finds the files of one."""
    host, device, third = str(Worker("host", shape.num_hosts - 1)), "device 0", f"s{3 * shape.commit_every:09d}"
    of_third = f"data/{third}"
    schedules = [
        ("before a host freezes", (kill("save.begin", host, nth=2),)),
        ("before a host writes", (kill("save.write", host, nth=2),)),
        (
            "in the middle of a shard file",
            (Fault(point="storage.write", action="kill_midway", rank=host, match=of_third),),
        ),
        ("after a shard file", (kill("storage.written", host, match=of_third),)),
        (
            "in the middle of a dense file",
            (Fault(point="storage.write", action="kill_midway", rank=device, match=of_third),),
        ),
        ("after all files, before the receipt", (kill("save.receipt", host, nth=2),)),
        ("driver, before the manifest", (kill("storage.create", "driver", match=f"commit/{third}"),)),
        ("driver, after the manifest", (kill("storage.written", "driver", match=f"commit/{third}"),)),
        ("driver, before it acknowledges", (kill("driver.acknowledge", "driver", match=third),)),
    ]
    found = [Schedule(number="F6", title=f"killed at a commit: {title}", faults=faults) for title, faults in schedules]
    found.append(
        Schedule(
            number="F6",
            title="killed in the middle of a delta file",
            faults=(Fault(point="storage.write", action="kill_midway", rank=host, match=of_third),),
            flags=("--full-every", "4"),
        )
    )
    pruned = f"s{shape.commit_every:09d}"
    keep = ("--keep", "2")
    for title, match in (("a manifest is deleted", f"commit/{pruned}"), ("its files are", f"data/{pruned}")):
        faults = (kill("storage.delete", "driver", match=match, nth=1 if "commit" in match else 2),)
        found.append(
            Schedule(number="F7", title=f"driver killed while old commits go: {title}", faults=faults, flags=keep)
        )
    return found


def _killed_while_restoring(shape: RunShape) -> list[Schedule]:
    lost = kill("step.update", "host 0", step=shape.step_after(2))
    cases = [("a new host killed as it reads the commit", 0)]
    if shape.num_hosts > 1:
        cases.append(("a host that lived on killed as it verifies its rows", shape.num_hosts - 1))
    return [
        Schedule(
            number="F8", title=title, faults=(lost, kill("restore.file", str(Worker("host", host)), nth=3, after=0))
        )
        for title, host in cases
    ]


def _driver_killed(shape: RunShape) -> list[Schedule]:
    # Windows end at the steps of commits, wherever else they do.
    step, boundary = shape.step_after(2), 3 * shape.commit_every
    after_a_fault = kill("step.update", "host 0", step=step)
    cases = [
        ("before its claim", (kill("storage.create", "driver", match=r"lease/.*claim"),)),
        ("after its claim", (kill("storage.written", "driver", match=r"lease/.*claim"),)),
        ("before it chose a base", (kill("storage.create", "driver", match=r"lease/.*base"),)),
        ("after it chose a base", (kill("storage.written", "driver", match=r"lease/.*base"),)),
        ("between windows", (kill("driver.window", "driver", step=boundary),)),
        ("in a recovery, before the new claim", (after_a_fault, kill("driver.fault", "driver"))),
        ("in a recovery, after it", (after_a_fault, kill("driver.recovered", "driver"))),
    ]
    found = [Schedule(number="F9", title=f"driver killed {title}", faults=faults) for title, faults in cases]
    # Until the other one has started.
    wait_s = 25 if shape.num_hosts > 1 else 12
    wait = (Fault(point="driver.window", action="delay", rank="driver", step=boundary, arguments={"seconds": wait_s}),)
    frozen = Fault(point="driver.window", action="stop", rank="driver", step=boundary, arguments={"wake_s": wait_s})
    return [
        *found,
        Schedule(
            number="F10",
            title="driver frozen, replaced by another one, and woken",
            faults=(frozen,),
            rival="takes_over",
            exit_codes=frozenset({86}),
            says=("has been claimed",),
            detect_s=60.0,
        ),
        Schedule(
            number="F11", title="a second driver asks for the run", faults=wait, rival="asks", says=("is held by",)
        ),
        Schedule(
            number="F11",
            title="a second driver takes the run over",
            faults=wait,
            rival="takes_over",
            exit_codes=frozenset({86}),
            says=("has been claimed",),
        ),
    ]


def _frames(shape: RunShape) -> list[Schedule]:
    step = shape.step_after(2)

    def frame(action: str, **arguments: Any) -> tuple[Fault, ...]:
        return (Fault(point="mesh.send", action=action, rank="host 0", step=step, arguments=arguments),)

    cases = [
        ("repeated", frame("duplicate")),
        ("cut short", frame("truncate")),
        ("lost", frame("drop")),
        ("with a bit turned in its header", frame("flip", byte=9)),
        ("whose connection breaks", frame("cut")),
    ]
    return [
        Schedule(number="F15", title=f"a frame {title}", faults=faults, recover_s=180.0 if title == "lost" else None)
        for title, faults in cases
    ]


def _at_write(
    shape: RunShape, action: str, *, rank: str = "", times: int = 1, for_s: float = 0.0, **arguments: Any
) -> Fault:
    """A fault of a host's writes of the third commit, by default of the last host."""
    return Fault(
        point="storage.write",
        action=action,
        rank=rank or str(Worker("host", shape.num_hosts - 1)),
        match=f"data/s{3 * shape.commit_every:09d}",
        times=times,
        for_s=for_s,
        arguments=arguments,
    )


def _at_commit(shape: RunShape, action: str, **arguments: Any) -> Fault:
    """A fault of the third manifest's creation."""
    match = f"commit/s{3 * shape.commit_every:09d}"
    return Fault(point="storage.create", action=action, rank="driver", match=match, arguments=arguments)


def _storage_that_fails(shape: RunShape) -> list[Schedule]:
    """F16 to F18: a storage that answers with errors, not at all, or slowly."""
    at_write, at_commit = partial(_at_write, shape), partial(_at_commit, shape)
    return [
        Schedule(
            number="F16", title="two answers 503 to a host's write", faults=(at_write("http_error", times=2, code=503),)
        ),
        Schedule(
            number="F16",
            title="timeouts of a host's write and of the manifest",
            faults=(at_write("raise", type="TimeoutError"), at_commit("raise", type="TimeoutError")),
        ),
        Schedule(
            number="F16",
            title="the answers to a write and to the manifest are lost",
            faults=(at_write("lost_answer"), at_commit("lost_answer")),
        ),
        Schedule(
            number="F16",
            title="the manifest's creation is sent twice and answered 412",
            faults=(at_commit("precondition_failed"),),
        ),
        Schedule(
            number="F17",
            title="the storage takes no shard files for 6 s",
            faults=(at_write("http_error", rank="host", for_s=6.0, code=503),),
        ),
        Schedule(
            number="F18",
            title="a storage of 200 kB/s for one host's save",
            faults=(at_write("throttle", for_s=8.0, bytes_per_s=2e5),),
        ),
    ]


def _storage_that_lies(shape: RunShape) -> list[Schedule]:
    """F19 to F23: a storage that keeps something else than it was given, shows something else than it has, or is
    full.
    """
    at_write, at_commit = partial(_at_write, shape), partial(_at_commit, shape)
    refused = frozenset({0, 87})

    def in_a_restore(number: str, title: str, action: str) -> Schedule:
        """Whichever host reads rows of table b after a fault."""
        lost = kill("step.update", "host 0", step=shape.step_after(2))
        misread = Fault(point="storage.read", action=action, rank="host", match=r"data/.*/tables/b/rows/c")
        return Schedule(number=number, title=f"{title}, in a restore", faults=(lost, misread), exit_codes=refused)

    return [
        Schedule(
            number="F19", title="a torn write that is reported as done", faults=(at_write("torn"),), exit_codes=refused
        ),
        Schedule(
            number="F19", title="a lost write that is reported as done", faults=(at_write("lost"),), exit_codes=refused
        ),
        Schedule(
            number="F20",
            title="a bit turned on its way to the storage; fsck must find it",
            faults=(at_write("flip"),),
            exit_codes=refused,
            damages=True,
        ),
        in_a_restore("F20", "a bit turned on its way from the storage", "flip"),
        in_a_restore("F21", "a read that ends early", "short_read"),
        Schedule(
            number="F22",
            title="listings that miss the newest name, at a restart",
            faults=(
                kill("driver.window", "driver", step=3 * shape.commit_every),
                Fault(point="storage.list", action="stale", rank="driver", match="^commit", times=2, after=0),
            ),
            exit_codes=frozenset({0, 87}),
        ),
        Schedule(number="F23", title="no space for a shard file", faults=(at_write("no_space"),), exit_codes=refused),
        Schedule(number="F23", title="no space for a manifest", faults=(at_commit("no_space"),), exit_codes=refused),
    ]


def _memory_and_values(shape: RunShape) -> list[Schedule]:
    step, boundary = shape.step_after(2), 3 * shape.commit_every

    def raises(point: str, rank: str, kind: str, message: str, times: int = 1) -> Fault:
        return Fault(point=point, action="raise", rank=rank, times=times, arguments={"type": kind, "message": message})

    exhausted = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes."
    stops = frozenset({1, 87, 88})
    return [
        Schedule(
            number="F24",
            title="a host without memory for its shard, in every generation",
            faults=(raises("start.begin", "host 0", "MemoryError", "injected: 64 GiB", times=EVERY_GENERATION),),
            exit_codes=stops,
            says=("MemoryError", "It was the second time"),
        ),
        Schedule(
            number="F24",
            title="a host ended by the kernel for its memory",
            faults=(kill("step.gather", "host 0", step=step),),
        ),
        Schedule(
            number="F25",
            title="a device without memory, in every generation",
            faults=(raises("device.step", "device 0", "JaxRuntimeError", exhausted, times=EVERY_GENERATION),),
            exit_codes=stops,
            says=("RESOURCE_EXHAUSTED", "It was the second time"),
        ),
        Schedule(
            number="F26",
            title="gradients of one host become NaN",
            faults=(Fault(point="device.gradients", action="nan", rank="device 0", step=step),),
            exit_codes=frozenset({1}),
            says=("Expected a finite number",),
        ),
        Schedule(
            number="F26",
            title="gradients become NaN in the last step before a commit",
            faults=(Fault(point="device.gradients", action="nan", rank="device 0", step=boundary - 1),),
            exit_codes=frozenset({1}),
            says=("The last commit, from before, stands",),
        ),
        *(
            Schedule(
                number="F28",
                title=f"an id that is {fault.replace('_', ' ')}",
                faults=(),
                exit_codes=frozenset({87}),
                settings={"id_fault": fault},
                says=("Found id", "column 'b'", "Ids are 0 to"),
            )
            for fault in ("negative", "too_large", "largest")
        ),
        *(
            Schedule(
                number="F40" if fault == "one_bucket" else "F28",
                title=title,
                faults=(kill("step.update.between", "host 0", step=step),),
                settings={"id_fault": fault},
            )
            for fault, title in (
                ("all_equal", "one id in all samples, and a kill"),
                ("huge_bag", "a bag of 20,000 ids, and a kill"),
                ("one_bucket", "all ids of a table in one bucket, and a kill"),
            )
        ),
    ]


def _signals_and_sizes(shape: RunShape) -> list[Schedule]:
    boundary = 3 * shape.commit_every

    def signals(name: str, times: int = 1) -> tuple[Fault, ...]:
        sent = Fault(point="driver.window", action="signal", rank="driver", step=boundary, arguments={"name": name})
        return (sent,) * times

    step = shape.step_after(1)
    many = tuple(
        kill("step.gather", str(Worker("host", at % shape.num_hosts)), step=shape.step_after(at)) for at in range(1, 6)
    )
    return [
        Schedule(number="F37", title="SIGTERM to the driver", faults=signals("SIGTERM")),
        Schedule(number="F38", title="Ctrl-C once", faults=signals("SIGINT")),
        Schedule(number="F38", title="Ctrl-C twice", faults=signals("SIGINT", 2), exit_codes=frozenset({130})),
        Schedule(
            number="F39",
            title=f"{shape.num_hosts} hosts become {shape.num_hosts + 1}",
            faults=signals("SIGTERM"),
            hosts_after=shape.num_hosts + 1,
            compares="samples",
        ),
        Schedule(
            number="F39",
            title=f"{shape.num_hosts} hosts become one, after a kill",
            faults=(kill("step.update", "host 0", step=step), *signals("SIGTERM")),
            hosts_after=1,
            compares="samples",
        ),
        Schedule(number="F44", title="five kills in one run; nothing grows", faults=many),
    ]


def _at(fault: Fault, step: int) -> Fault:
    return replace(fault, step=step)


def drawn(seed: int, shape: RunShape) -> Schedule:
    """A random schedule of one to three faults that a run must survive with the same bytes."""
    rng = random.Random(seed)
    menus: Sequence[Callable[[random.Random, RunShape], Fault]] = (
        _worker_kill,
        _worker_kill,
        _save_fault,
        _driver_kill,
        _storage_error,
    )
    # At most two kills in one interval between commits: the run's patience is for three.
    faults = [rng.choice(menus)(rng, shape) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    flags = ("--full-every", "3") if rng.random() < 0.3 else ()
    title = "; ".join(fault.describe() for fault in faults)
    return Schedule(number="random", label=f"seed {seed}", title=title, faults=tuple(faults), flags=flags)


def _worker_kill(rng: random.Random, shape: RunShape) -> Fault:
    host, step = rng.randrange(shape.num_hosts), rng.randrange(1, shape.num_steps - 1)
    if rng.random() < 0.3:
        return kill(rng.choice(DEVICE_POINTS), str(Worker("device", host)), step=step)
    return kill(
        rng.choice([point for names in PHASES.values() for point in names if "end" not in point]),
        str(Worker("host", host)),
        step=step,
    )


def _save_fault(rng: random.Random, shape: RunShape) -> Fault:
    commit = rng.randrange(1, shape.num_steps // shape.commit_every + 1) * shape.commit_every
    rank, match = str(Worker("host", rng.randrange(shape.num_hosts))), f"data/s{commit:09d}"
    if rng.random() < 0.5:
        return Fault(point="storage.write", action="kill_midway", rank=rank, match=match, nth=rng.randrange(1, 4))
    return kill(rng.choice(("storage.write", "storage.written")), rank, match=match, nth=rng.randrange(1, 4))


def _driver_kill(rng: random.Random, shape: RunShape) -> Fault:
    commit = rng.randrange(1, shape.num_steps // shape.commit_every + 1) * shape.commit_every
    return rng.choice(
        (
            kill("driver.window", "driver", step=commit),
            kill("storage.create", "driver", match=f"commit/s{commit:09d}"),
            kill("storage.written", "driver", match=f"commit/s{commit:09d}"),
            kill("storage.written", "driver", match=r"lease/.*claim"),
            kill("storage.create", "driver", match=r"lease/.*base"),
        )
    )


def _storage_error(rng: random.Random, shape: RunShape) -> Fault:
    commit = rng.randrange(1, shape.num_steps // shape.commit_every + 1) * shape.commit_every
    rank, match = str(Worker("host", rng.randrange(shape.num_hosts))), f"data/s{commit:09d}"
    return rng.choice(
        (
            Fault(point="storage.write", action="http_error", rank=rank, match=match, times=2, arguments={"code": 503}),
            Fault(point="storage.write", action="lost_answer", rank=rank, match=match),
            Fault(point="storage.create", action="lost_answer", rank="driver", match=f"commit/s{commit:09d}"),
            Fault(point="storage.create", action="precondition_failed", rank="driver", match=f"commit/s{commit:09d}"),
        )
    )
