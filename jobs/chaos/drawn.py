"""Random schedules, by their seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from podembed.jobs.chaos.schedule import DEVICE_POINTS, PHASES, RunShape, Schedule, kill
from podembed.workers.faults.plan import Fault
from podembed.workers.liveness.worker import Worker


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
