"""Exported files as other programs read them: NumPy, pyarrow, zarr as the oracle of the source, and a safetensors
reader of ten lines.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.reference import CommittedState, open_commit
from podembed.serving.committed_rows import row_batches
from podembed.serving.new_files import new_file
from podembed.tools.inspect.describe import Format, export
from podembed.workers.checkpoint.chunks import ChunkDamaged
from tests.orchestrator.committed_tables import (
    SampleTable,
    commit_tables,
    create_run,
    flip_byte,
    random_table,
    run_with,
    two_tables,
)

TABLES = two_tables()
# Enough for one, two or all positions of the four buckets of `users` rows.
BATCHES = [1, 4 * 3 * 4 * 2, 1 << 20]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> CommittedState:
    store, _ = run_with(tmp_path_factory.mktemp("export") / "run", TABLES, 10, 20)
    return open_commit(store.location)


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    types = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8"), "BF16": np.dtype(ml_dtypes.bfloat16)}
    tensors = {}
    end = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == end, "the format forbids gaps"
        end = stop
        values = np.frombuffer(data[8 + length :][start:stop], types[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    assert 8 + length + end == len(data)
    assert (8 + length) % 8 == 0
    return tensors, metadata


def assert_bytes(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("batch_bytes", BATCHES)
@pytest.mark.parametrize("table", ["users", "items"])
class TestFormats:
    def test_npy(self, state: CommittedState, tmp_path: Path, table: str, batch_bytes: int) -> None:
        out = tmp_path / "rows.npy"
        written = export(state, table, format="npy", out=str(out), batch_bytes=batch_bytes)
        assert_bytes(np.load(out, allow_pickle=False), TABLES[table].arrays["rows"])
        assert_bytes(np.asarray(np.load(out, mmap_mode="r")), TABLES[table].arrays["rows"])
        assert (written.path, written.size_bytes) == (str(out), out.stat().st_size)
        assert (written.commit, written.num_rows) == (state.manifest.name, len(TABLES[table].arrays["rows"]))

    def test_npy_with_slots(self, state: CommittedState, tmp_path: Path, table: str, batch_bytes: int) -> None:
        out = tmp_path / "all.npy"
        export(state, table, format="npy", out=str(out), with_slots=True, batch_bytes=batch_bytes)
        records = np.load(out, allow_pickle=False)
        assert records.dtype.names == tuple(TABLES[table].arrays)
        for name, values in TABLES[table].arrays.items():
            assert_bytes(np.ascontiguousarray(records[name]), values)

    def test_parquet(self, state: CommittedState, tmp_path: Path, table: str, batch_bytes: int) -> None:
        out = tmp_path / "all.parquet"
        export(state, table, format="parquet", out=str(out), with_slots=True, batch_bytes=batch_bytes)
        read = pq.read_table(out)
        arrays = TABLES[table].arrays
        assert read.column_names == ["id", *arrays]
        assert read["id"].to_pylist() == list(range(len(arrays["rows"])))
        for name, values in arrays.items():
            assert_bytes(np.array(read[name].to_pylist(), np.float32), values)
        metadata = {key: value for key, value in read.schema.metadata.items() if not key.startswith(b"ARROW")}
        assert metadata[b"table"] == table.encode()
        assert metadata[b"commit"] == state.manifest.name.encode()
        if table == "users" and batch_bytes == 1:
            assert pq.ParquetFile(out).num_row_groups == 10

    def test_safetensors(self, state: CommittedState, tmp_path: Path, table: str, batch_bytes: int) -> None:
        out = tmp_path / "all.safetensors"
        export(state, table, format="safetensors", out=str(out), with_slots=True, batch_bytes=batch_bytes)
        tensors, metadata = read_safetensors(out)
        assert [*tensors] == [*TABLES[table].arrays]
        for name, values in TABLES[table].arrays.items():
            assert_bytes(tensors[name], values)
        assert metadata == {"table": table, "run_id": "run-1", "commit": state.manifest.name, "step": "20"}


def test_rows_alone_without_slots(state: CommittedState, tmp_path: Path) -> None:
    export(state, "users", format="parquet", out=str(tmp_path / "a"))
    export(state, "users", format="safetensors", out=str(tmp_path / "b"))
    assert pq.read_table(tmp_path / "a").column_names == ["id", "rows"]
    assert [*read_safetensors(tmp_path / "b")[0]] == ["rows"]


def test_zarr_reads_the_same_from_the_commit(state: CommittedState, tmp_path: Path) -> None:
    export(state, "users", format="npy", out=str(tmp_path / "rows.npy"))
    files = state.table("users")
    array: Any = zarr.open(f"{state.store.location}/{files.arrays[0].path}", mode="r")
    rows = array[:].transpose(1, 0, 2).reshape(-1, files.dim)[: files.num_rows]
    assert_bytes(np.load(tmp_path / "rows.npy"), np.ascontiguousarray(rows))


def test_an_older_commit_is_exported_by_its_name(tmp_path: Path) -> None:
    store, lease = create_run(tmp_path / "run", TABLES)
    first = commit_tables(store, lease, 10, TABLES)
    commit_tables(store, lease, 20, two_tables(seed=9))
    for at, state in enumerate(
        [open_commit(store.location, commit=first.name), open_commit(f"{store.location}@{first.name}")]
    ):
        export(state, "users", format="npy", out=str(tmp_path / f"{at}.npy"))
        assert_bytes(np.load(tmp_path / f"{at}.npy"), TABLES["users"].arrays["rows"])


def test_other_element_types(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    half = rng.standard_normal((11, 2)).astype(ml_dtypes.bfloat16)
    counts = rng.integers(-9, 9, (11, 1))
    store, _ = run_with(
        tmp_path / "run", {"t": SampleTable(num_buckets=4, arrays={"rows": half, "count": counts, "id": counts})}, 10
    )
    state = open_commit(store.location)
    out: dict[Format, str] = {f: str(tmp_path / f"t.{f}") for f in ("npy", "parquet", "safetensors")}
    export(state, "t", format="safetensors", out=out["safetensors"], with_slots=True)
    tensors, _ = read_safetensors(Path(out["safetensors"]))
    assert_bytes(tensors["rows"], half)
    assert_bytes(tensors["count"], counts)
    for format in ("npy", "parquet"):
        with pytest.raises(ConfigurationError, match="Found bfloat16"):
            export(state, "t", format=format, out=out[format])
    assert sorted(os.listdir(tmp_path)) == ["run", "t.safetensors"]


def test_slots_of_a_table_without_any_have_the_form_of_those_with_some(tmp_path: Path) -> None:
    """SGD keeps none. A program that reads records by the name of a field reads these, too."""
    rows = random_table(3, num_rows=21, num_buckets=4, widths={"rows": 2})
    store, _ = run_with(tmp_path / "run", {"t": rows}, 10)
    state, values = open_commit(store.location), rows.arrays["rows"]
    out: dict[Format, Path] = {f: tmp_path / f"t.{f}" for f in ("npy", "parquet", "safetensors")}
    for format, path in out.items():
        written = export(state, "t", format=format, out=str(path), with_slots=True)
        assert written.widths == {"rows": 2}
    records = np.load(out["npy"], allow_pickle=False)
    assert (records.dtype.names, records.shape) == (("rows",), (21,))
    assert_bytes(np.ascontiguousarray(records["rows"]), values)
    read = pq.read_table(out["parquet"])
    assert read.column_names == ["id", "rows"]
    assert_bytes(np.array(read["rows"].to_pylist(), np.float32), values)
    tensors, _ = read_safetensors(out["safetensors"])
    assert [*tensors] == ["rows"]
    assert_bytes(tensors["rows"], values)
    plain = tmp_path / "plain.npy"
    export(state, "t", format="npy", out=str(plain))
    assert_bytes(np.load(plain), values)


def test_a_slot_with_the_name_of_the_id_column_is_refused_for_parquet(tmp_path: Path) -> None:
    values = np.zeros((4, 2), np.float32)
    store, _ = run_with(tmp_path / "run", {"t": SampleTable(num_buckets=1, arrays={"rows": values, "id": values})}, 10)
    with pytest.raises(ConfigurationError, match="slot 'id'"):
        export(open_commit(store.location), "t", format="parquet", out=str(tmp_path / "o"), with_slots=True)


class TestOutput:
    @pytest.mark.parametrize("kind", ["link", "pipe", "device"])
    def test_what_is_no_plain_file_is_never_replaced(self, tmp_path: Path, kind: str) -> None:
        out, target = tmp_path / "out.npy", tmp_path / "target"
        target.write_text("kept")
        if kind == "link":
            out.symlink_to(target)
        elif kind == "pipe":
            os.mkfifo(out)
        else:
            try:
                os.mknod(out, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
            except PermissionError:
                pytest.skip("this user may not make devices")
        before = out.lstat()
        with (
            pytest.raises(
                ConfigurationError, match=r"is a link, a pipe or a device\. Expected a plain file to replace"
            ),
            new_file(str(out), force=True) as file,
        ):
            file.write(b"x")
        assert (out.lstat().st_ino, out.lstat().st_mode) == (before.st_ino, before.st_mode)
        assert target.read_text() == "kept"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npy", "target"]

    def test_a_file_is_replaced_only_when_forced(self, state: CommittedState, tmp_path: Path) -> None:
        out = tmp_path / "rows.npy"
        out.write_bytes(b"mine")
        with pytest.raises(ConfigurationError, match="--force"):
            export(state, "users", format="npy", out=str(out))
        assert out.read_bytes() == b"mine"
        export(state, "users", format="npy", out=str(out), force=True)
        assert_bytes(np.load(out), TABLES["users"].arrays["rows"])
        assert os.listdir(tmp_path) == ["rows.npy"]

    def test_a_file_that_appears_meanwhile_is_not_replaced(
        self, state: CommittedState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "rows.npy"
        read_range = type(state.store).read_range

        def slow(store, name, **where):
            out.write_bytes(b"somebody else's")
            return read_range(store, name, **where)

        monkeypatch.setattr(type(state.store), "read_range", slow)
        with pytest.raises(ConfigurationError, match="Found a file at"):
            export(state, "users", format="npy", out=str(out))
        assert out.read_bytes() == b"somebody else's"
        assert os.listdir(tmp_path) == ["rows.npy"]

    @pytest.mark.parametrize("batch_bytes", BATCHES)
    @pytest.mark.parametrize("format", ["npy", "parquet", "safetensors"])
    @pytest.mark.parametrize("at", [2, -1])
    def test_damage_leaves_nothing(self, tmp_path: Path, format: Format, batch_bytes: int, at: int) -> None:
        table = {"t": random_table(1, num_rows=21, num_buckets=4, widths={"rows": 2})}
        store, (manifest,) = run_with(tmp_path / "run", table, 10)
        chunk = manifest.tables[0].chunks[3]
        flip_byte(store.locate(chunk.name), at % chunk.size_bytes)
        with pytest.raises(ChunkDamaged, match=r"rows/c.3.0.0.*CRC-32C"):
            export(open_commit(store.location), "t", format=format, out=str(tmp_path / "o"), batch_bytes=batch_bytes)
        assert os.listdir(tmp_path) == ["run"]

    @pytest.mark.parametrize("how", ["gone", "short", "long"])
    def test_a_chunk_that_is_gone_or_torn(self, tmp_path: Path, how: str) -> None:
        store, (manifest,) = run_with(tmp_path / "run", TABLES, 10)
        path = Path(store.locate(manifest.tables[0].chunks[2].name))
        data = path.read_bytes()
        path.unlink()
        if how != "gone":
            path.write_bytes(data[:-1] if how == "short" else data + b"\0")
        with pytest.raises(ChunkDamaged, match=r"rows/c.2.0.0"):
            export(open_commit(store.location), "users", format="npy", out=str(tmp_path / "o"))
        assert os.listdir(tmp_path) == ["run"]

    @pytest.mark.parametrize(
        ("out", "message"),
        [("gs://bucket/file", "local path"), ("{}/missing/file", "Create it"), ("{}", "name of a file")],
    )
    def test_places_that_cannot_be_written(self, state, tmp_path: Path, out: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            export(state, "users", format="npy", out=out.format(tmp_path))

    def test_an_unknown_table_is_refused_with_those_that_there_are(self, state, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="users, items"):
            export(state, "user", format="npy", out=str(tmp_path / "o"))


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """A table of 6 MB in batches of 64 kB. The Python side of everything that is read and written goes through numpy
    and bytes.
    """
    table = {"t": random_table(2, num_rows=48_000, num_buckets=4, widths={"rows": 32})}
    store, _ = run_with(tmp_path / "run", table, 10)
    state = open_commit(store.location)
    tracemalloc.start()
    try:
        export(state, "t", format="npy", out=str(tmp_path / "o"), batch_bytes=1 << 16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert_bytes(np.load(tmp_path / "o"), table["t"].arrays["rows"])


def test_batches_have_the_rows_that_memory_allows(state: CommittedState) -> None:
    files = state.table("users")
    sizes = [
        [len(batch) for batch in row_batches(state.store, files, files.arrays[0], batch_bytes=batch_bytes)]
        for batch_bytes in BATCHES
    ]
    assert sizes == [[4] * 9 + [1], [8] * 4 + [5], [37]]
