"""Batches for the device half of a step alone: activations that stay the same, and room for their gradients."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from podembed.embedding.kernels.arrays import aligned_zeros

if TYPE_CHECKING:
    from podembed.workers.device.transfers.ways import HostArrays
    from podembed.workers.job.job import JobConfig


def host_arrays(job: JobConfig, num_samples: int, *, buffer: int = 0) -> HostArrays:
    """A batch in the memory of the host.

    Args:
      num_samples: of this host.
      buffer: which batch of the memory it is; each has values of its own.
    """
    from podembed.workers.device.programs import Inputs
    from podembed.workers.device.transfers.ways import HostArrays
    from podembed.workers.job.padding import LARGEST_LEVELS

    random = np.random.default_rng(buffer)
    activations = tuple(random.standard_normal((num_samples, width), dtype=np.float32) for width in job.widths.values())
    inputs = Inputs(
        dense=random.random((num_samples, job.data.num_dense), dtype=np.float32),
        activations=activations,
        labels=(random.random(num_samples) < 0.3).astype(np.float32),
        weights=np.ones(num_samples, np.float32),
    )
    # Where a host has them: a cache line begins each, and frozen tables get none.
    gradients = tuple(aligned_zeros(one.shape) for one in compress(activations, job.trained_features))
    return HostArrays(inputs, gradients, np.zeros(num_samples, np.float32), buffer, LARGEST_LEVELS)
