"""Tables of awkward sizes, committed as real files: fewer rows than cores, not divisible by them, narrow and wide."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from podembed.orchestrator.run.reference import CommittedState, open_commit
from tests.orchestrator.committed_tables import SampleTable, random_table, run_with
from tests.run_state import tables_of

ADAGRAD = ("rows", "accumulator")
ADAM = ("rows", "momentum", "velocity")


def awkward_tables() -> dict[str, SampleTable]:
    """`tiny`, `odd` and `narrow` are as wide as each other when they are padded; `wide` and `even` stand alone."""
    return {
        "tiny": random_table(1, num_rows=3, num_buckets=1, widths=dict.fromkeys(ADAGRAD, 3)),
        "odd": random_table(2, num_rows=1001, num_buckets=16, widths=dict.fromkeys(ADAGRAD, 8)),
        "narrow": random_table(3, num_rows=77, num_buckets=4, widths=dict.fromkeys(ADAGRAD, 1)),
        "wide": random_table(4, num_rows=130, num_buckets=8, widths=dict.fromkeys(ADAM, 20)),
        "even": random_table(5, num_rows=512, num_buckets=64, widths={"rows": 16}),
    }


def committed(path: Path, tables: dict[str, SampleTable]) -> CommittedState:
    store, _ = run_with(path, tables, 40)
    return open_commit(store.location)


def same_arrays(state: CommittedState, tables: dict[str, SampleTable]) -> None:
    """Every array of the commit, bit for bit."""
    found = tables_of(state.store, state.manifest)
    expected = {f"{name}/{array}": values for name, table in tables.items() for array, values in table.arrays.items()}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint32), values.view(np.uint32), err_msg=name)
