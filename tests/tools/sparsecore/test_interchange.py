"""Out of a run and back, bit for bit; what is refused; what is left when it fails."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.reference import CommittedState, open_commit
from podembed.tools.fsck.check import check_run
from podembed.tools.inspect.diff import diff
from podembed.tools.sparsecore.export import export_sparsecore
from podembed.tools.sparsecore.folder import RECORD_FILE, read_specification
from podembed.tools.sparsecore.imported import import_sparsecore
from podembed.tools.sparsecore.layout import Stack, plan_stacks
from podembed.workers.checkpoint.chunks import ChunkDamaged
from tests.long_tests import long_case
from tests.orchestrator.committed_tables import SampleTable, flip_byte, random_table
from tests.tools.sparsecore.samples import awkward_tables, committed, same_arrays

TABLES = awkward_tables()
STACKED = [["odd", "tiny", "narrow"]]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> CommittedState:
    return committed(tmp_path_factory.mktemp("sparsecore") / "run", TABLES)


def stacks_of(state: CommittedState, *, chips: int = 16, cores: int = 2, together=STACKED) -> tuple[Stack, ...]:
    sizes = {table.name: (table.num_rows, table.dim) for table in state.manifest.tables}
    return plan_stacks(sizes, chips=chips, cores=cores, together=together)


def export(state: CommittedState, out: Path, *, stacks: tuple[Stack, ...] | None = None, batch_bytes: int = 1 << 20):
    stacks = stacks_of(state) if stacks is None else stacks
    return export_sparsecore(state, stacks, out=str(out), with_slots=True, batch_bytes=batch_bytes)


@pytest.mark.parametrize("batch_bytes", [long_case(1), 3000, 1 << 20])
@pytest.mark.parametrize(("chips", "cores"), [(1, 1), long_case(3, 1), long_case(4, 4), (16, 2)])
def test_what_comes_back_is_what_was_committed(
    state: CommittedState, tmp_path: Path, chips: int, cores: int, batch_bytes: int
) -> None:
    export(state, tmp_path / "out", stacks=stacks_of(state, chips=chips, cores=cores), batch_bytes=batch_bytes)
    manifest = import_sparsecore(str(tmp_path / "out"), str(tmp_path / "back"))
    back = open_commit(str(tmp_path / "back"))
    assert (back.manifest, manifest.step) == (manifest, 40)
    same_arrays(back, {name: TABLES[name] for name in ("odd", "tiny", "narrow", "wide", "even")})
    difference = diff(state, back)
    assert [table.name for table in difference.tables if not table.is_equal] == []
    assert check_run(str(tmp_path / "back")).is_intact


def test_rows_alone(state: CommittedState, tmp_path: Path) -> None:
    export_sparsecore(state, stacks_of(state), out=str(tmp_path / "out"))
    import_sparsecore(str(tmp_path / "out"), str(tmp_path / "back"))
    rows = {name: SampleTable(num_buckets=1, arrays={"rows": table.arrays["rows"]}) for name, table in TABLES.items()}
    same_arrays(open_commit(str(tmp_path / "back")), rows)


def test_narrow_floats_are_widened_and_come_back(tmp_path: Path) -> None:
    arrays = random_table(7, num_rows=90, num_buckets=4, widths={"rows": 5, "accumulator": 5}).arrays
    half = {**arrays, "rows": arrays["rows"].astype(ml_dtypes.bfloat16)}
    state = committed(tmp_path / "run", {"t": SampleTable(num_buckets=4, arrays=half)})
    export(state, tmp_path / "out", stacks=stacks_of(state, together=[]))
    assert np.load(tmp_path / "out" / "t" / "table.npy").dtype == np.float32
    import_sparsecore(str(tmp_path / "out"), str(tmp_path / "back"))
    back = open_commit(str(tmp_path / "back"))
    assert [array.dtype for array in back.table("t").arrays] == ["bfloat16", "float32"]
    assert [table.name for table in diff(state, back).tables if not table.is_equal] == []


def test_padding_keeps_numbers_where_nothing_is_learned(state: CommittedState, tmp_path: Path) -> None:
    """An optimizer that divides by the root of the accumulator must not make NaN of a row that no id names."""
    export(state, tmp_path / "out")
    folder = tmp_path / "out" / "odd_tiny_narrow"
    rows, accumulator = np.load(folder / "table.npy"), np.load(folder / "slots" / "accumulator.npy")
    assert (rows.shape, accumulator.shape) == (((32 + 8 + 8) * 32, 8), ((32 + 8 + 8) * 32, 8))
    held = np.zeros((32, 48, 8), bool)
    (stack,) = (stack for stack in stacks_of(state) if stack.name == "odd_tiny_narrow")
    for table in stack.tables:
        for piece in stack.pieces(table, 0, table.num_rows):
            held[piece.core, piece.position : piece.position + piece.count, : table.dim] = True
    padding = ~held.reshape(rows.shape)
    assert padding.any()
    assert (rows[padding] == 0).all()
    assert (accumulator[padding] == 1).all()


def test_values_that_another_program_trained(state: CommittedState, tmp_path: Path) -> None:
    """As it saves them: without our record, slots by name."""
    export(state, tmp_path / "out")
    (tmp_path / "out" / RECORD_FILE).unlink()
    for path in (tmp_path / "out").rglob("*.npy"):
        np.save(path, np.load(path) * 2)
    import_sparsecore(str(tmp_path / "out"), str(tmp_path / "back"))
    doubled = {
        name: replace(table, arrays={array: values * 2 for array, values in table.arrays.items()})
        for name, table in TABLES.items()
    }
    back = open_commit(str(tmp_path / "back"))
    same_arrays(back, doubled)
    assert [array.name for array in back.table("wide").arrays] == ["rows", "momentum", "velocity"]
    assert back.manifest.step == 0


def test_a_layout_of_another_program_is_followed(state: CommittedState, tmp_path: Path) -> None:
    export(state, tmp_path / "one")
    stacks = read_specification(str(tmp_path / "one" / "embedding_spec.pb"))
    turned = tuple(
        replace(stack, tables=tuple(replace(table, rotation=(table.rotation + 7) % 32) for table in stack.tables))
        for stack in stacks
    )
    export(state, tmp_path / "other", stacks=turned)
    one, other = (np.load(tmp_path / name / "even" / "table.npy") for name in ("one", "other"))
    np.testing.assert_array_equal(np.roll(one.reshape(32, -1, 16), 7, axis=0), other.reshape(32, -1, 16))


def archive(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, rows=np.zeros((512, 16), np.float32))


class TestRefusals:
    def test_slots_of_another_width(self, tmp_path: Path) -> None:
        state = committed(
            tmp_path / "run", {"t": random_table(1, num_rows=9, num_buckets=1, widths={"rows": 4, "accumulator": 1})}
        )
        with pytest.raises(ConfigurationError, match="Expected slots as wide as rows"):
            export(state, tmp_path / "out", stacks=stacks_of(state, together=[]))
        export_sparsecore(state, stacks_of(state, together=[]), out=str(tmp_path / "out"))

    def test_tables_of_two_optimizers_in_a_stack(self, state: CommittedState, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="Expected one optimizer a stack"):
            export(state, tmp_path / "out", stacks=stacks_of(state, together=[["odd", "even"]]))
        assert os.listdir(tmp_path) == []

    def test_integers(self, tmp_path: Path) -> None:
        counts = np.arange(12, dtype=np.int64).reshape(6, 2)
        state = committed(tmp_path / "run", {"t": SampleTable(num_buckets=2, arrays={"rows": counts})})
        with pytest.raises(ConfigurationError, match="Found elements of int64"):
            export(state, tmp_path / "out", stacks=stacks_of(state, together=[]))

    def test_a_specification_of_other_tables(self, state: CommittedState, tmp_path: Path) -> None:
        (wrong,) = plan_stacks({"even": (513, 16)}, chips=1, cores=1)
        with pytest.raises(ConfigurationError, match=r"Expected \[512, 16\]"):
            export(state, tmp_path / "out", stacks=(wrong,))
        (missing,) = plan_stacks({"gone": (5, 16)}, chips=1, cores=1)
        with pytest.raises(ConfigurationError, match="Found no table 'gone'"):
            export(state, tmp_path / "out", stacks=(missing,))

    def test_names_that_are_taken(self, state: CommittedState, tmp_path: Path) -> None:
        export(state, tmp_path / "out")
        with pytest.raises(ConfigurationError, match="Found something at"):
            export(state, tmp_path / "out")
        import_sparsecore(str(tmp_path / "out"), str(tmp_path / "back"))
        with pytest.raises(ConfigurationError, match="Found a run in"):
            import_sparsecore(str(tmp_path / "out"), str(tmp_path / "back"))

    def test_a_damaged_commit_leaves_nothing(self, tmp_path: Path) -> None:
        state = committed(tmp_path / "run", {"even": TABLES["even"]})
        files = state.table("even")
        flip_byte(f"{state.store.location}/{files.chunk(files.arrays[0], 63).name}", 40)
        with pytest.raises(ChunkDamaged):
            export(state, tmp_path / "out", stacks=stacks_of(state, together=[]))
        assert os.listdir(tmp_path) == ["run"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda folder: (folder / "even" / "table.npy").unlink(), "Found no array in"),
            (lambda folder: np.save(folder / "even" / "table.npy", np.zeros((512, 16))), "Found float64"),
            (lambda folder: np.save(folder / "even" / "table.npy", np.zeros((256, 16), "f4")), "Expected float32"),
            (lambda folder: np.save(folder / "even" / "table.npy", np.array([{}, {}], object)), "Found no array in"),
            (lambda folder: os.truncate(folder / "even" / "table.npy", 4000), "Found no array in"),
            (lambda folder: os.truncate(folder / "even" / "table.npy", 0), "Found no array in"),
            (lambda folder: archive(folder / "even" / "table.npy"), "Found an archive in"),
            (lambda folder: (folder / "embedding_spec.pb").unlink(), "Found no way to read"),
            (lambda folder: (folder / "wide" / "slots" / "velocity.npy").unlink(), "Found no array in"),
        ],
    )
    def test_a_folder_that_lacks_something(self, state: CommittedState, tmp_path: Path, change, message: str) -> None:
        export(state, tmp_path / "out")
        change(tmp_path / "out")
        with pytest.raises(ConfigurationError, match=message):
            import_sparsecore(str(tmp_path / "out"), str(tmp_path / "back"))
        assert not (tmp_path / "back" / "RUN.json").exists()

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="Found no folder"):
            import_sparsecore(str(tmp_path / "out"), str(tmp_path / "back"))
