"""`TrainedForward`: the forward pass of a job as its evaluations compile it, on one device of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import PartitionSpec as P

from podembed.serving.predict.pooled_rows import LookedUp
from podembed.serving.served_files import SCORED_PARTS
from podembed.workers.device.dense_half import initial
from podembed.workers.device.dense_leaves import replaced
from podembed.workers.device.options import AXIS
from podembed.workers.device.programs import Inputs, scores_of_batch
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import PaddingLevels, SequencePadding
from podembed.workers.model.context import Shares


class TrainedForward:
    """Scores of whole batches, the same as a run on one host gives.

    Args:
      dense: the arrays of `params` and `state` by their keys, as a checkpoint has them.

    Raises:
      DenseStateError: they are not those of the job.
    """

    def __init__(self, job: JobConfig, dense: Mapping[str, np.ndarray]) -> None:
        self._params, self._state = dense_state(job, dense)
        shares = Shares(num_samples=job.batch_size, real=(job.batch_size,))
        mesh = DeviceMesh(np.asarray(jax.local_devices()[:1]), (AXIS,))
        padding = SequencePadding(job.sequences, job.batch_size)

        @cache
        def program(levels: PaddingLevels) -> Callable[..., jax.Array]:
            longest = {name: padding.longest(name, levels) for name in job.sequences}
            return jax.jit(
                jax.shard_map(
                    partial(scores_of_batch, job, shares, longest),
                    mesh=mesh,
                    in_specs=(P(), P(), P(AXIS), P()),
                    out_specs=P(AXIS),
                    check_vma=False,
                )
            )

        self._program = program

    def scores(self, found: LookedUp, *, number: int) -> np.ndarray:
        """float32 `[batch_size]`, or `[batch_size, c]` of candidates.

        Args:
          found: of the job's whole batch size, with padding.
          number: number of the batch in its evaluation.
        """
        batch = found.batch
        inputs = Inputs(
            dense=jnp.asarray(batch.dense),
            activations=tuple(map(jnp.asarray, found.activations)),
            labels=jnp.asarray(batch.labels),
            weights=jnp.asarray(batch.weights),
            lengths={name: jnp.asarray(lengths) for name, lengths in found.lengths.items()},
            columns={name: jnp.asarray(values) for name, values in batch.columns.items()},
        )
        return np.asarray(self._program(found.levels)(self._params, self._state, inputs, jnp.uint32(number)))


def check_dense(job: JobConfig, dense: Mapping[str, np.ndarray]) -> None:
    """Raises `DenseStateError` where these are not the arrays of a job's model."""
    params, state = jax.eval_shape(lambda: initial(job, jax.random.key(job.seed)))
    replaced({"params": params, "state": state}, dense, parts=SCORED_PARTS, put=lambda values, leaf: values)


def dense_state(job: JobConfig, dense: Mapping[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Parameters and state of a job's model with these arrays as their leaves.

    Raises:
      DenseStateError: they are not those of the job.
    """
    params, state = jax.eval_shape(lambda: initial(job, jax.random.key(job.seed)))
    restored = replaced({"params": params, "state": state}, dense, parts=SCORED_PARTS)
    return restored["params"], restored["state"]
