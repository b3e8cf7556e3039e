"""Trains a step on the devices of this process. Prints what lies side by side, and sums over quarters of the rows."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from podembed.workers.device import step_programs
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.device.options import DeviceOptions, Transfers
from tests.workers.device.transfers.test_side_by_side import NUM_SAMPLES, all_of, host_arrays, job_of

NUM_PARTS = 4


def step_here() -> dict[str, Any]:
    found = []
    look = step_programs.side_by_side
    job = job_of(all_of)
    worker = DeviceWorker(job=job, num_samples=NUM_SAMPLES, options=DeviceOptions(transfers=Transfers.SEPARATE))
    with patch.object(step_programs, "side_by_side", lambda *given: found.append(look(*given)) or found[-1]):
        worker.build()
    batch = host_arrays(job, NUM_SAMPLES)
    worker.begin_training(batch, weight_sum=float(NUM_SAMPLES)).finish()
    # By column, so that rows and columns in a wrong place are found.
    sums = [part.sum(axis=0).tolist() for block in batch.gradients for part in np.split(block, NUM_PARTS)]
    return {"together": found[0].together, "devices": jax.local_device_count(), "sums": sums}


if __name__ == "__main__":
    print(json.dumps(step_here()))
