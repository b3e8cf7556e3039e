"""The code of docs/sparsecore.md, as it stands there, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from podembed.jobs.cli.main import main
from podembed.orchestrator.run.reference import open_commit
from tests.orchestrator.committed_tables import SampleTable
from tests.pages import blocks
from tests.tools.sparsecore.models import features
from tests.tools.sparsecore.package import embedding_spec
from tests.tools.sparsecore.samples import awkward_tables, committed, same_arrays


def podembed(*arguments: object) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert caught.value.code == 0


def test_the_code_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {name: awkward_tables()[name] for name in ("odd", "tiny")}
    optimizer = embedding_spec.AdagradOptimizerSpec()
    names: dict[str, Any] = {"feature_specs": features(tables, chips=16, cores=2, together=[["odd", "tiny"]])}
    state = committed(tmp_path / "run", tables)
    layout, transfer = blocks("docs/sparsecore.md", fragments=True)
    layout.run(names)
    podembed("export", state.store.location, "--layout", "sparsecore", "--spec", "model.pb", "--slots", "--out", "out")

    transfer.run(names)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    variables = names["load"]("out", "odd_tiny", optimizer, sharding)
    assert variables.slot._fields == ("accumulator",)
    names["save"]("out", "odd_tiny", jax.tree.map(lambda values: values + values, variables))
    podembed("import", "out", "--out", "back")
    doubled = {
        name: SampleTable(num_buckets=1, arrays={array: 2 * values for array, values in table.arrays.items()})
        for name, table in tables.items()
    }
    same_arrays(open_commit("back"), doubled)
