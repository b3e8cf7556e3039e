"""One of two JAX processes with two devices each, as accelerators have them: nothing is read in place, and every host
feeds several.

Usage: python -m tests.workers.device.gang_process PROCESS COORDINATOR DATA_FOLDER OUT. Trains its host's share of some
batches, loads its dense arrays, and evaluates the first; what its host gets goes to the file OUT, with the number of
its batch threads. The second process lists its devices in another order than the gang does, which JAX allows.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from podembed.workers.device.gang import join_gang, leave_gang
from podembed.workers.device.shared_memory import RecordKind
from podembed.workers.device.waiting_threads import threads
from tests.small_job import small_job
from tests.workers.device.test_model_step import Pair, random_batch

NUM_PROCESSES = 2
NUM_STEPS = 3
WEIGHT_SUM = 50.0


def share(job: Any, step: int, process: int) -> dict[str, Any]:
    """One host's part of a batch."""
    return random_batch(job, 10 * step + process)


def _no_collective(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a value that every process has anyway was compared over the gang")


def main() -> None:
    process, coordinator, folder, out = int(sys.argv[1]), *sys.argv[2:]
    join_gang(coordinator=coordinator, num_processes=NUM_PROCESSES, process=process, timeout_s=600)
    batch_threads = sum(os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in threads())
    if process == 1:
        own = jax.local_devices()
        jax.local_devices = lambda *_, **__: own[::-1]
    job = small_job(folder=folder, audit=False)
    pair = Pair(job)
    multihost_utils.assert_equal = multihost_utils.process_allgather = _no_collective
    batches = [share(job, step, process) for step in range(NUM_STEPS)]
    losses = pair.window(batches, RecordKind.TRAIN, weight_sum=WEIGHT_SUM).losses
    gradients = {f"{step}/{at}": g for step, (found, _) in enumerate(pair.answers) for at, g in enumerate(found)}
    pair.worker.load_dense_arrays({key: values.copy() for key, values in pair.worker.dense_arrays().items()})
    pair.window(batches[:1], RecordKind.EVALUATE)
    found = {"losses": losses, "scores": pair.answers[0][1], "batch_threads": batch_threads, **gradients}
    np.savez(out, **found)  # type: ignore[arg-type]
    pair.close()
    leave_gang()


if __name__ == "__main__":
    main()
