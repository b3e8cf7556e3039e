"""Schedules of a storage that fails or lies."""

from __future__ import annotations

from functools import partial
from typing import Any

from podembed.jobs.chaos.schedule import RunShape, Schedule, kill
from podembed.workers.faults.plan import Fault
from podembed.workers.liveness.worker import Worker


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


def storage_that_fails(shape: RunShape) -> list[Schedule]:
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


def storage_that_lies(shape: RunShape) -> list[Schedule]:
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
