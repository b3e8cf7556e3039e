"""An export judged by `jax-tpu-embedding` itself: its stacking, its sharding, and its ways back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from podembed.orchestrator.run.reference import CommittedState, open_commit
from podembed.tools.sparsecore.export import export_sparsecore
from podembed.tools.sparsecore.imported import import_sparsecore
from podembed.tools.sparsecore.layout import Stack, plan_stacks
from podembed.tools.sparsecore.specification import from_bytes
from tests.long_tests import long_case
from tests.tools.sparsecore.models import features
from tests.tools.sparsecore.package import embedding, embedding_spec_pb2, table_stacking
from tests.tools.sparsecore.samples import awkward_tables, committed, same_arrays

TABLES = awkward_tables()
PODS = [(1, 2), (4, 4), (16, 2)]
GROUPS = [[], [["odd", "tiny", "narrow"]], [["narrow", "odd"], ["even", "wide"]]]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> CommittedState:
    return committed(tmp_path_factory.mktemp("package") / "run", TABLES)


def planned(*, chips: int, cores: int, together: Sequence[Sequence[str]]) -> tuple[Stack, ...]:
    sizes = {name: table.arrays["rows"].shape for name, table in TABLES.items()}
    return plan_stacks(
        {name: (n, dim) for name, (n, dim) in sizes.items()}, chips=chips, cores=cores, together=together
    )


def by_place(stack: Stack) -> Stack:
    """With its tables as they lie; the package names them in the order of the features."""
    return replace(stack, tables=tuple(sorted(stack.tables, key=lambda table: table.row_offset)))


@pytest.mark.parametrize("together", GROUPS)
@pytest.mark.parametrize(("chips", "cores"), PODS)
def test_the_package_lays_tables_out_in_the_same_places(chips: int, cores: int, together) -> None:
    made = features(TABLES, chips=chips, cores=cores, together=together)
    proto = embedding.create_proto_from_feature_specs(made, chips, cores)
    theirs = from_bytes(proto.SerializeToString(), "theirs")
    ours = planned(chips=chips, cores=cores, together=together)
    assert {stack.name: by_place(stack) for stack in theirs} == {stack.name: by_place(stack) for stack in ours}


@pytest.mark.parametrize("together", GROUPS)
@pytest.mark.parametrize(("chips", "cores"), [*(long_case(*pod) for pod in PODS[:-1]), PODS[-1]])
def test_the_package_reads_the_export(state: CommittedState, tmp_path: Path, chips: int, cores: int, together) -> None:
    stacks = planned(chips=chips, cores=cores, together=together)
    export_sparsecore(state, stacks, out=str(tmp_path / "out"))
    proto = embedding_spec_pb2.EmbeddingSpecProto.FromString((tmp_path / "out" / "embedding_spec.pb").read_bytes())
    arrays = {stack.name: jax.numpy.asarray(np.load(tmp_path / "out" / stack.name / "table.npy")) for stack in stacks}
    found = table_stacking.unstack_and_unshard_stacked_tables(arrays, proto)
    assert found.keys() == TABLES.keys()
    for name, table in TABLES.items():
        assert np.asarray(found[name]).tobytes() == table.arrays["rows"].tobytes(), name
    # Its other way back, by specifications of tables.
    specs = {f.table_spec.name: f.table_spec for f in features(TABLES, chips=chips, cores=cores, together=together)}
    again = table_stacking.unshard_and_unstack_tables(specs, arrays, chips * cores)
    for name, table in TABLES.items():
        assert np.asarray(again[name]).tobytes() == table.arrays["rows"].tobytes(), name


@pytest.mark.parametrize(("chips", "cores"), PODS)
def test_the_package_stacks_to_the_same_bytes_with_slots(tmp_path: Path, chips: int, cores: int) -> None:
    tables = {name: TABLES[name] for name in ("odd", "tiny", "narrow")}
    state = committed(tmp_path / "run", tables)
    sizes = {name: table.arrays["rows"].shape for name, table in tables.items()}
    stacks = plan_stacks({n: (r, d) for n, (r, d) in sizes.items()}, chips=chips, cores=cores, together=[[*tables]])
    export_sparsecore(state, stacks, out=str(tmp_path / "out"), with_slots=True)
    made = features(tables, chips=chips, cores=cores, together=[[*tables]])
    specs = {feature.table_spec.name: feature.table_spec for feature in made}
    for array, file, padding in (("rows", "table.npy", 0.0), ("accumulator", "slots/accumulator.npy", 1.0)):
        values = {name: table.arrays[array] for name, table in tables.items()}
        (theirs,) = table_stacking.stack_and_shard_tables(specs, values, chips * cores, pad_value=padding).values()
        ours = np.load(tmp_path / "out" / "odd_tiny_narrow" / file)
        assert np.asarray(theirs).reshape(ours.shape).tobytes() == ours.tobytes(), array


def test_tables_that_the_package_made_come_in(tmp_path: Path) -> None:
    """A program of the package writes its variables; the import finds what the package itself takes out of them."""
    chips, cores, together = 4, 2, [["odd", "tiny", "narrow"]]
    tables = {name: TABLES[name] for name in together[0]}
    made = features(tables, chips=chips, cores=cores, together=together)
    specs = {feature.table_spec.name: feature.table_spec for feature in made}
    folder = tmp_path / "out" / "odd_tiny_narrow"
    (folder / "slots").mkdir(parents=True)
    for array, file in (("rows", "table.npy"), ("accumulator", "slots/accumulator.npy")):
        values = {name: table.arrays[array] for name, table in tables.items()}
        (stacked,) = table_stacking.stack_and_shard_tables(specs, values, chips * cores).values()
        np.save(folder / file, np.asarray(stacked).reshape(-1, stacked.shape[-1]))
    proto = embedding.create_proto_from_feature_specs(made, chips, cores)
    (tmp_path / "out" / "embedding_spec.pb").write_bytes(proto.SerializeToString())
    import_sparsecore(str(tmp_path / "out"), str(tmp_path / "run"))
    same_arrays(open_commit(str(tmp_path / "run")), tables)
