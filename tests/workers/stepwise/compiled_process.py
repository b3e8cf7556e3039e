"""The programs of a `TPUEmbedding` with sharded tables, compiled by the TPU's own compiler. Prints JSON.

Usage: python -m tests.workers.stepwise.compiled_process v6e:2x2 v5e:2x2 ...
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import numpy as np
from jax.experimental import topologies

from podembed.embedding.config import TableConfig
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.optimizers import SGD, Adam, Optimizer
from podembed.embedding.shards import cut_for_parts, sharded_arrays
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.engine import EngineSpec
from podembed.tools.preflight.program_text import flaws_in
from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.options import DeviceOptions
from podembed.workers.job.padding import ONE_ID, room_level
from podembed.workers.stepwise.sharded_tables import BatchShape, ShardedTables

NUM_ROWS, DIM, NUM_BAGS = 100_000, 128, 1024


def compiled(optimizer: Optimizer, devices: list[Any]) -> dict[str, Any]:
    """Two tables of one array: one feature has an id a bag, the other one weighted bags."""
    mesh = GangMesh.over(devices, devices, DeviceOptions(), num_hosts=1)
    configs = [TableConfig(NUM_ROWS, DIM, name=name, optimizer=optimizer, place="sharded") for name in ("a", "b")]
    specs = [cut_for_parts(TableSpec.of(one, seed=0, most_hosts=1), mesh.num_parts) for one in configs]
    spec = EngineSpec(
        tables=tuple(specs),
        features=tuple(FeatureBinding(name=str(at), table=at, combiner="mean") for at in range(2)),
        quantization=(None, None),
        is_pipelined=False,
        learning_rates=(0.1, 0.1),
        rate_tags=(None, None),
    )
    tables = ShardedTables(
        spec, {at: Table(one, np.arange(one.layout.num_buckets)) for at, one in enumerate(specs)}, mesh=mesh
    )
    shape = BatchShape((NUM_BAGS, NUM_BAGS), (ONE_ID, room_level(2.0 * NUM_BAGS), room_level(300.0)), (False, True))
    look_up, update = tables.lowered(shape)
    (array,) = sharded_arrays(specs, mesh.num_parts)
    found = {}
    for name, lowered in (("look_up", look_up), ("update", update)):
        made = lowered.compile()
        memory = made.memory_analysis()
        found[name] = {
            "argument_bytes": memory.argument_size_in_bytes,
            "shared_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "flaws": flaws_in(lowered.as_text(), made.as_text(), tables=[(array.rows_per_part, DIM)]),
        }
    return found


if __name__ == "__main__":
    there = {name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices for name in sys.argv[1:]}
    rules = (SGD(0.1), Adam(0.1), Adam(0.1, lazy_adam=False))
    print(json.dumps({name: [compiled(rule, list(devices)) for rule in rules] for name, devices in there.items()}))
