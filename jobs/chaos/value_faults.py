"""Schedules of what processes get: frames that are broken, too little memory, gradients and ids that are no good."""

from __future__ import annotations

from typing import Any

from podembed.jobs.chaos.schedule import RunShape, Schedule, ended_with, kill, lost_to
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import DataRefused, JobFailed
from podembed.orchestrator.decisions.failure import FaultClass
from podembed.orchestrator.run.manifest_of_save import StateSpoilt
from podembed.workers.faults.plan import Fault

# More than a run ever begins.
EVERY_GENERATION = 99


def frames(shape: RunShape) -> list[Schedule]:
    """F15: frames between hosts."""
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


def memory_and_values(shape: RunShape) -> list[Schedule]:
    """F24 to F28, and F40: memory, gradients and ids."""
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
            tells=(lost_to(FaultClass.HOST_MEMORY), ended_with(ConfigurationError)),
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
            tells=(lost_to(FaultClass.DEVICE_MEMORY), ended_with(ConfigurationError)),
        ),
        Schedule(
            number="F26",
            title="gradients of one host become NaN",
            faults=(Fault(point="device.gradients", action="nan", rank="device 0", step=step),),
            exit_codes=frozenset({1}),
            tells=(ended_with(JobFailed),),
        ),
        Schedule(
            number="F26",
            title="gradients become NaN in the last step before a commit",
            faults=(Fault(point="device.gradients", action="nan", rank="device 0", step=boundary - 1),),
            exit_codes=frozenset({1}),
            # The next loss may show it before the commit does.
            tells=(ended_with(JobFailed, StateSpoilt),),
        ),
        *(
            Schedule(
                number="F28",
                title=f"an id that is {fault.replace('_', ' ')}",
                faults=(),
                exit_codes=frozenset({87}),
                settings={"id_fault": fault},
                tells=(ended_with(DataRefused),),
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
