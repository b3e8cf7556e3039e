"""Programs that the tests compile, and the figures that are stored of them: `python -m tests.tools.preflight.compiled`
stores them anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax

from podembed.tools.preflight.account import ProgramAccount
from podembed.tools.preflight.compiling import SliceAccount, compile_for
from podembed.tools.preflight.slices import parse_slice
from podembed.workers.device.options import DeviceOptions
from podembed.workers.job.reference import JobReference

ROOT = Path(__file__).parents[3]
STORED = Path(__file__).parent / "programs.json"


class Compiled(NamedTuple):
    """A job, with the slices that it is compiled for: names, each with a number of hosts if that is not its own."""

    function: str
    arguments: dict[str, Any]
    slices: tuple[tuple[str, int | None], ...]
    has_sparse_cores: bool = False

    def accounts(self) -> list[SliceAccount]:
        job = JobReference(function=self.function, arguments=self.arguments, folder=str(ROOT))
        wanted = [parse_slice(name, num_hosts=hosts) for name, hosts in self.slices]
        options = DeviceOptions(has_sparse_cores=self.has_sparse_cores)
        return compile_for(job, wanted, options=options, environ=os.environ)


_SMALL: dict[str, Any] = {"batch_size": 512, "dim": 16, "mlps": "small"}
_SHORT: dict[str, Any] = {"batch_size": 64, "length": 16, "dim": 16}
# In `make test`: tables on the chips of several hosts. Other tests compile for tables on hosts.
FEW = {
    "sharded": Compiled(
        "tests.tools.preflight.odd_jobs:linear",
        {"place": "sharded", "batch_size": 1024, "rows": 1_000_000},
        (("v6e:2x4", 2),),
    ),
    "on SparseCores": Compiled(
        "tests.tools.preflight.odd_jobs:linear",
        {"place": "sharded", "batch_size": 1024, "dim": 32},
        (("v6e:2x4", 2),),
        has_sparse_cores=True,
    ),
}
MANY = {
    "dlrm": Compiled("benchmarks.chip_jobs:dlrm", _SMALL, (("v5e:2x2", None),)),
    "dlrm of two cores a chip": Compiled("benchmarks.chip_jobs:dlrm", _SMALL, (("tpu7x:2x2x1", None),)),
    "sasrec": Compiled("benchmarks.chip_jobs:next_item", _SHORT, (("v6e:2x4", 2),)),
    "dlrm of two hosts": Compiled("benchmarks.chip_jobs:dlrm", _SMALL, (("v6e:2x4", 2),)),
    "dlrm of many chips": Compiled(
        "benchmarks.chip_jobs:dlrm",
        {**_SMALL, "batch_size": 4096, "num_lanes": 128},
        (("v5p:8x8x8", None), ("v5e:16x16", None), ("v4-32", None), ("v6e-1", None)),
    ),
    "hstu": Compiled("benchmarks.chip_jobs:next_item", {**_SHORT, "model": "hstu", "blocks": 2}, (("v6e:2x4", 2),)),
    "MLPerf's dlrm": Compiled("benchmarks.chip_jobs:dlrm", {}, (("v6e:2x2", None),)),
    "replicated": Compiled(
        "tests.tools.preflight.odd_jobs:linear", {"place": "replicated", "dim": 64}, (("v6e:2x4", 2),)
    ),
    "narrow": Compiled(
        "tests.tools.preflight.odd_jobs:linear",
        {"place": "sharded", "batch_size": 1024, "dim": 16},
        (("v5e:2x2", None),),
    ),
    "sharded over many": Compiled(
        "tests.tools.preflight.odd_jobs:linear", {"place": "sharded", "batch_size": 4096}, (("v5p-128", 16),)
    ),
    "on many SparseCores": Compiled(
        "tests.tools.preflight.odd_jobs:linear",
        {"place": "sharded", "batch_size": 16384, "num_lanes": 128},
        (("v5p-128", 16), ("v5p:8x8x8", None), ("tpu7x:2x2x1", None)),
        has_sparse_cores=True,
    ),
}


def figures(program: ProgramAccount) -> dict[str, Any]:
    """What is stored of a program."""
    return {
        "flops": program.flops,
        "memory_traffic_bytes": program.memory_traffic_bytes,
        "temporary_bytes": program.temporary_bytes,
        "collectives": {f"{one.kind} among {one.group}": [one.count, one.size_bytes] for one in program.collectives},
    }


def all_figures(compiled: dict[str, Compiled]) -> dict[str, Any]:
    return {
        name: {
            account.wanted.name: {program.name: figures(program) for program in account.programs}
            for account in one.accounts()
        }
        for name, one in compiled.items()
    }


def version() -> str:
    """The compiler comes with a version of JAX."""
    return jax.__version__


if __name__ == "__main__":
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    stored[version()] = all_figures(FEW | MANY)
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
