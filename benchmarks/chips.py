"""What the TPU's compiler makes of training steps, on a machine without a TPU. Prints one JSON line.

    python benchmarks/chips.py [--topology v6e:2x2] [--shapes dlrm-128 sasrec ...] [--sparse-cores]

Figures are those of one device and one step: seconds to compile, bytes of arguments and of temporaries, bytes to and
from the chip's memory, the same as a multiple of the step's arguments and results, and bytes of collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from podembed.tools.preflight.compiling import compile_for
from podembed.tools.preflight.slices import parse_slice
from podembed.workers.device.options import DeviceOptions
from podembed.workers.job.reference import JobReference

ROOT = Path(__file__).parents[1]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dlrm-128": ("dlrm", {"dim": 128}),
    "dlrm-32": ("dlrm", {"dim": 32}),
    "dlrm-16": ("dlrm", {"dim": 16}),
    **{
        f"sharded-{dim}": ("dlrm", {"dim": dim, "batch_size": 1024, "place": "sharded", "num_rows": 1_000_000})
        for dim in (16, 32, 64, 128)
    },
    "sasrec": ("next_item", {"batch_size": 1024}),
    "hstu": ("next_item", {"model": "hstu", "blocks": 2, "batch_size": 1024}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v6e:2x2")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sparse-cores", action="store_true", help="let SparseCores look sharded tables up")
    options = parser.parse_args()
    found, devices = {}, DeviceOptions(has_sparse_cores=options.sparse_cores)
    for shape in options.shapes:
        name, arguments = SHAPES[shape]
        job = JobReference(function=f"benchmarks.chip_jobs:{name}", arguments=arguments, folder=str(ROOT))
        (account,) = compile_for(job, [parse_slice(options.topology)], options=devices, environ=os.environ)
        if account.failures:
            raise SystemExit(f"{shape}: {account.failures}")
        program = next(program for program in account.programs if program.name.startswith("train"))
        arrays = program.argument_bytes + program.result_bytes
        found[shape] = {
            "compile_s": round(program.compile_s, 1),
            "argument_mb": round(program.argument_bytes / 1e6, 1),
            "temporary_mb": round(program.temporary_bytes / 1e6, 1),
            "memory_traffic_mb": round(program.memory_traffic_bytes / 1e6, 1),
            "times_arrays": round(program.memory_traffic_bytes / arrays, 2),
            "collectives": sum(one.count for one in program.collectives),
            "collective_mb": round(sum(one.size_bytes for one in program.collectives) / 1e6, 2),
            "bound": program.bound(account.wanted.rates)[0],
        }
    print(json.dumps({"topology": options.topology, "steps": found}))


if __name__ == "__main__":
    main()
