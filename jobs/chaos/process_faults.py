"""Schedules of what strikes processes: they are killed, frozen, slow, or get signals; then the number of hosts changes,
too.
"""

from __future__ import annotations

from dataclasses import replace

from podembed.jobs.chaos.schedule import DEVICE_POINTS, PHASES, RunShape, Schedule, Told, ended_with, kill
from podembed.orchestrator.commit.lease import Fenced
from podembed.orchestrator.events.machines import MemoryWrong
from podembed.orchestrator.events.progress import HostSlow
from podembed.workers.faults.plan import Fault
from podembed.workers.liveness.progress import Phase
from podembed.workers.liveness.worker import Worker


def killed_in_a_step(shape: RunShape) -> list[Schedule]:
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


def killed_together(shape: RunShape) -> list[Schedule]:
    """F2 and F3: several processes at once, and one in the recovery of another."""
    step, hosts = shape.step_after(2), range(shape.num_hosts)
    pair = (
        kill("step.update", "host 0", step=step),
        kill("device.step", str(Worker("device", shape.num_hosts - 1)), step=step),
    )
    everyone = tuple(kill("step.gradient_exchange", str(Worker("host", host)), step=step) for host in hosts)
    first = kill("step.update", "host 0", step=step)
    last = shape.num_hosts - 1
    # A host that lives on reads nothing.
    restores = "verify.bucket" if shape.num_hosts > 1 else "restore.file"
    return [
        Schedule(number="F2", title="a host and another host's device killed together", faults=pair),
        Schedule(number="F2", title="all hosts killed together", faults=everyone),
        Schedule(
            number="F3",
            title="a host killed as it restores, in the recovery of another",
            faults=(first, kill(restores, str(Worker("host", last)), after=0)),
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


def frozen_or_slow(shape: RunShape) -> list[Schedule]:
    """F4 and F5."""
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
        found.append(
            Schedule(
                number="F5",
                title=title,
                faults=(slow,),
                tells=(Told(HostSlow.kind, {"host": 0, "phase": Phase.GATHER.value}),),
            )
        )
    return found


def killed_while_saving(shape: RunShape) -> list[Schedule]:
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


def killed_while_restoring(shape: RunShape) -> list[Schedule]:
    """F8."""
    lost = kill("step.update", "host 0", step=shape.step_after(2))
    reads = kill("restore.file", "host 0", nth=3, after=0)
    found = [Schedule(number="F8", title="a new host killed as it reads the commit", faults=(lost, reads))]
    if shape.num_hosts > 1:
        last = str(Worker("host", shape.num_hosts - 1))
        verifies = kill("verify.bucket", last, nth=3, after=0)
        wrong = Fault(point="verify.bucket", rank=last, action="nan", nth=3, after=0)
        spoilt = Fault(point="verify.begin", rank=last, action="nan", after=0)
        slow = Fault(point="verify.bucket", rank=last, action="delay", after=1, arguments={"seconds": 8.0})
        found += [
            Schedule(number="F8", title="a host that lived on killed as it verifies its rows", faults=(lost, verifies)),
            Schedule(
                number="F8",
                title="a host that lived on has wrong rows, found while training goes on",
                faults=(lost, wrong),
                tells=(Told(MemoryWrong.kind, {"buckets": 1}),),
            ),
            Schedule(
                number="F8",
                title="wrong rows of a host that lived on make the loss infinite before they are found",
                faults=(lost, spoilt, slow),
                tells=(Told(MemoryWrong.kind, {"buckets": 1}),),
            ),
        ]
    return found


def driver_killed(shape: RunShape) -> list[Schedule]:
    """F9 to F11: the driver is killed, frozen, or replaced."""
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
            tells=(ended_with(Fenced),),
            detect_s=60.0,
        ),
        Schedule(number="F11", title="a second driver asks for the run", faults=wait, rival="asks"),
        Schedule(
            number="F11",
            title="a second driver takes the run over",
            faults=wait,
            rival="takes_over",
            exit_codes=frozenset({86}),
            tells=(ended_with(Fenced),),
        ),
    ]


def signals_and_sizes(shape: RunShape) -> list[Schedule]:
    """F37 to F39, and F44: signals, other numbers of hosts, and many kills."""
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
