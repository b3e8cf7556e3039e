"""One of the processes of `test_gradient_reducer`: joins `jax.distributed`, trains two steps, prints what it holds as
JSON.

Arguments: coordinator address, number of processes, own index.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podembed.embedding.tf.keras.keras_optimizers import SGD, Adam
from podembed.embedding.tf.keras.row_slices import RowSlices
from podembed.embedding.tf.keras.variable import Variable


def main(address: str, num_processes: int, index: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(address, num_processes, index, initialization_timeout=150)
    weights, idle, table = (
        Variable([0.0, 0.0], name="w"),
        Variable(7.0, name="idle"),
        Variable(np.zeros((4, 2)), name="table"),
    )
    optimizer = SGD(1.0)
    # Process 0 brings one row, process 1 two, one of them the same: lengths differ and rows meet.
    slices = RowSlices([1], np.ones((1, 2)), (4, 2)) if index == 0 else RowSlices([1, 3], np.full((2, 2), 10.0), (4, 2))
    pairs = [(np.array([1.0, 2.0]) * (index + 1), weights), (None, idle), (slices, table)]
    sums = [gradient for gradient, _ in optimizer.aggregate_gradients(pairs)]
    optimizer.apply_gradients(pairs)
    first = {"w": weights.numpy().tolist(), "table": table.numpy().tolist()}
    optimizer.apply_gradients([(np.array([index, index]), weights)], skip_gradients_aggregation=True)
    adam, scalar = Adam(0.1), Variable(1.0)
    adam.minimize(lambda: scalar * (index + 1), [scalar])
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("process",)), PartitionSpec())
    summed_already = jax.jit(lambda: jnp.float32(2.0), out_shardings=everywhere)()
    refusal = ""
    try:
        optimizer.aggregate_gradients([(summed_already, idle)])
    except ValueError as error:
        refusal = str(error)
    held = {
        **first,
        "refusal": refusal,
        "none_stays": sums[1] is None,
        "gathered_rows": sums[2].indices.tolist(),
        "idle": float(idle),
        "skipped": weights.numpy().tolist(),
        "iterations": int(optimizer.iterations),
        "adam": float(scalar),
        "processes": jax.process_count(),
    }
    print(json.dumps(held), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
