"""A job's loss, sample by sample, on the host: what an evaluation reports as `loss`.

A device answers an evaluation with scores alone. The loss is a cheap function of them, so the host computes it, on its
processor: JAX is loaded for that only where the job declares a loss of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from podembed.workers.job.job import Loss
from podembed.workers.job.quality import cross_entropies


def sample_losses(loss: Loss | None) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function of float32 scores and labels, each `[n]`, that returns the losses `[n]`; `None` is the default loss,
    as in `JobConfig`.
    """
    if loss is None:
        return cross_entropies
    import jax

    compiled = jax.jit(loss)
    return lambda scores, labels: np.asarray(compiled(scores, labels))
