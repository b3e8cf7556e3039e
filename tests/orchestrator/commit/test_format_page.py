"""docs/checkpoint-format.md, read literally: a reader that imports nothing of ours, and members that the page lists
completely.

Everything between the two marks is what a stranger would write from the page alone.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import struct
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from podembed.embedding.tf.keras.keras_optimizers import Adam
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit import checkpoint, holder, lease_files, manifest, run_record
from podembed.orchestrator.run import history, history_record, job_settings
from podembed.orchestrator.run.reference import open_commit
from podembed.tools.inspect.describe import export
from podembed.workers.checkpoint import files as checkpoint_files
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import seal
from tests.orchestrator.cluster.test_in_process import train
from tests.orchestrator.commit.checkpoint_samples import TABLES, take, values_of, write_next
from tests.orchestrator.committed_tables import commit_changes, commit_tables, create_run, random_table
from tests.small_job import small_job

PAGE = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"
MASK = (1 << 64) - 1

# ---------------------------------------------------------------- begin of the independent reader


def read_sealed(path: Path) -> dict:
    import hashlib

    data = path.read_bytes()
    if hashlib.sha256(data[:-78] + b"}").hexdigest() != data[-67:-3].decode():
        raise ValueError(f"{path} is damaged")
    return json.loads(data)


def find_head(run: Path) -> str | None:
    bases = {int(path.name[1:].split(".")[0]): path for path in (run / "lease").glob("g*.base.json")}
    if not bases:
        return None
    newest = max(bases)
    own = [path.stem for path in (run / "commit").glob(f"s*-g{newest:08d}.json")]
    return max(own, key=lambda name: int(name[1:].split("-")[0])) if own else read_sealed(bases[newest])["commit"]


def read_chunk(run: Path, name: str, size_bytes: int, crc32c: int) -> bytes:
    (chunk,) = read_chunks(run, name, size_bytes, [crc32c])
    return chunk


def read_chunks(run: Path, name: str, size_bytes: int, crc32c: list[int]) -> list[bytes]:
    """All chunks of a file. The index behind several of them is what it must be for chunks of equal length."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*", name):
        raise ValueError(f"unsafe name {name}")
    path = run / name
    if path.stat().st_size != size_bytes:
        raise ValueError(f"{name} is torn")
    data = path.read_bytes()
    num_chunks, chunks = len(crc32c), []
    index_bytes = 16 * num_chunks + 4 if num_chunks > 1 else 0
    length = (size_bytes - index_bytes) // num_chunks
    for at, expected in enumerate(crc32c):
        chunk, trailer = data[at * length : (at + 1) * length - 4], data[(at + 1) * length - 4 : (at + 1) * length]
        found = google_crc32c.value(chunk)
        if found != struct.unpack("<I", trailer)[0] or found != expected:
            raise ValueError(f"{name} is damaged")
        chunks.append(chunk)
    if index_bytes:
        index = b"".join(struct.pack("<QQ", at * length, length) for at in range(num_chunks))
        if data[-index_bytes:] != index + struct.pack("<I", google_crc32c.value(index)):
            raise ValueError(f"{name} has a damaged index")
    return chunks


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def row_hash(row: int, parts: list[bytes]) -> tuple[int, int]:
    a, b = mix((row + 0x9E3779B97F4A7C15) & MASK), mix((row + 0xD1B54A32D192ED03) & MASK)
    for part in parts:
        words = struct.unpack(f"<{-(-len(part) // 8)}Q", part + bytes(-len(part) % 8))
        for word in words:
            a = ((a ^ word) * 0xFF51AFD7ED558CCD) & MASK
            a ^= a >> 32
            b = ((b + word) * 0xC4CEB9FE1A85EC53) & MASK
            b ^= b >> 29
        a, b = mix((a + len(words)) & MASK), mix((b + len(words)) & MASK)
    return mix(a), mix(b)


def column(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


def read_table(run: Path, commit: str, name: str) -> dict[str, np.ndarray]:
    """Rows and slots of a table in the order of row numbers, with every check of the page."""
    document = read_sealed(run / "commit" / f"{commit}.json")
    if document["format_version"] not in (1, 2, 3, 4):
        raise ValueError("unknown format")
    has_lists = document["format_version"] < 3
    (table,) = [table for table in document["tables"] if table["name"] == name]
    num_buckets, num_rows, per_file = table["num_buckets"], table["num_rows"], table.get("buckets_per_file", 1)
    digests = table["digests"] if has_lists else [d.tobytes().hex() for d in column(table["digests"], "V16")]
    buckets: dict[str, list[np.ndarray]] = {}
    for array in table["arrays"]:
        described, num_files = table["chunks"][array["name"]], num_buckets // per_file
        if has_lists:
            files, crc32c = zip(described["name"], described["size_bytes"], strict=True), described["crc32c"]
        else:
            separator = table["separator"] if document["format_version"] >= 4 else "/"
            names = (f"{array['path']}/{separator.join(['c', str(k), '0', '0'])}" for k in range(num_files))
            files = ((name, described["size_bytes"]) for name in names)
            crc32c = column(described["crc32c"], "<u4").tolist()
        checksums = [crc32c[first : first + per_file] for first in range(0, num_buckets, per_file)]
        chunks = [
            chunk
            for (name, size_bytes), crc32c in zip(files, checksums, strict=True)
            for chunk in read_chunks(run, name, size_bytes, crc32c)
        ]
        dtype = np.dtype(array["dtype"]).newbyteorder("<")
        buckets[array["name"]] = [
            np.frombuffer(chunk, dtype).reshape(table["rows_per_bucket"], array["width"]).copy() for chunk in chunks
        ]
    for part in (part for delta in table["deltas"] for part in delta["parts"]):
        ids, *changes = [read_whole(run, file) for file in part["files"]]
        for values, change in zip(buckets.values(), changes, strict=True):
            for row, changed in zip(ids.tolist(), change, strict=True):
                values[row % num_buckets][row // num_buckets] = changed
    for bucket in range(num_buckets):
        a = b = 0
        for row in range(bucket, num_rows, num_buckets):
            hashes = row_hash(row, [values[bucket][row // num_buckets].tobytes() for values in buckets.values()])
            a, b = (a + hashes[0]) & MASK, (b + hashes[1]) & MASK
        if f"{a:016x}{b:016x}" != digests[bucket]:
            raise ValueError(f"bucket {bucket} of {name} is damaged")
    return {
        array: np.stack(values).transpose(1, 0, 2).reshape(-1, values[0].shape[1])[:num_rows]
        for array, values in buckets.items()
    }


def read_leaf(run: Path, commit: str, key: str) -> np.ndarray:
    (leaf,) = [leaf for leaf in read_sealed(run / "commit" / f"{commit}.json")["dense"] if leaf["key"] == key]
    return read_whole(run, leaf)


def read_whole(run: Path, file: dict) -> np.ndarray:
    is_bfloat16 = file["dtype"] == "bfloat16"
    dtype = np.dtype("uint16" if is_bfloat16 else file["dtype"]).newbyteorder("<")
    if file["size_bytes"] == 0:
        return np.empty(file["shape"], dtype)
    chunk = "/".join([file["path"], "c", *["0"] * len(file["shape"])])
    values = np.frombuffer(read_chunk(run, chunk, file["size_bytes"], file["crc32c"]), dtype).reshape(file["shape"])
    # The upper half of a float32.
    return (values.astype("<u4") << 16).view("<f4") if is_bfloat16 else values


def read_dense_model(run: Path, commit: str) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]], int]:
    """Parameters by name, Adam's `mu` and `nu` of each by the same name, and its count."""
    leaves = {leaf["key"]: leaf for leaf in read_sealed(run / "commit" / f"{commit}.json")["dense"]}
    names = [key.removeprefix("params/") for key in leaves if key.startswith("params/")]
    parameters = {name: read_whole(run, leaves.pop(f"params/{name}")) for name in names}
    moments = {
        field: {name: read_whole(run, leaves.pop(f"optimizer/0/{field}/{name}")) for name in names}
        for field in ("mu", "nu")
    }
    count = read_whole(run, leaves.pop("optimizer/0/count"))
    if leaves or (count.dtype, count.shape) != (np.int32, ()):
        raise ValueError(f"leaves {list(leaves)} that Adam does not have, or a count of another form")
    return parameters, moments, int(count)


# ---------------------------------------------------------------- end of the independent reader


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = Store(tmp_path / "run")
    first = take(store)
    for step in (10, 20):
        checkpoint.commit(store, write_next(store, first, step), first)
    second = take(store, "b")
    checkpoint.commit(store, write_next(store, second, 15 + 10), second)
    store.create_exclusive("commit/s000000099-g00000001.json", b"a zombie's late commit")
    return tmp_path / "run"


def test_a_stranger_reads_our_tables(run: Path) -> None:
    commit = find_head(run)
    assert commit == "s000000025-g00000002"
    for name, (num_rows, num_buckets, widths) in TABLES.items():
        read = read_table(run, commit, name)
        assert list(read) == list(widths)
        for array, values in read.items():
            expected = values_of(25, name, array)
            for row in range(num_rows):
                np.testing.assert_array_equal(values[row], expected[row % num_buckets, row // num_buckets])
    np.testing.assert_array_equal(read_leaf(run, commit, "w"), np.full((2, 3), 25, np.float32))
    assert read_leaf(run, commit, "count") == 25


@pytest.fixture
def incremental(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A run whose newest commit is the second delta of its chain, and the values of its table in row order."""
    url = tmp_path / "incremental"
    store = Store(url)
    tables = {"users": random_table(1, num_rows=37, num_buckets=4, widths={"rows": 3, "accumulator": 1})}
    store, lease_of_run = create_run(url, tables)
    expected = {name: values.copy() for name, values in tables["users"].arrays.items()}
    newest = commit_tables(store, lease_of_run, 10, tables)
    for step, ids in ((20, [0, 5, 36]), (30, [5, 8, 9])):
        for values in expected.values():
            values[ids] += step
        newest = commit_changes(store, lease_of_run, newest, step, {"users": (ids, expected)})
    return url, expected


def test_a_stranger_reads_a_chain(incremental: tuple[Path, dict[str, np.ndarray]]) -> None:
    run, expected = incremental
    commit = find_head(run)
    assert commit == "s000000030-g00000001"
    for name, values in read_table(run, commit, "users").items():
        np.testing.assert_array_equal(values, expected[name])


def test_a_stranger_notices_a_chain_out_of_order_or_with_a_damaged_link(
    incremental: tuple[Path, dict[str, np.ndarray]],
) -> None:
    run, _ = incremental
    commit = "s000000030-g00000001"
    links = sorted((run / "data" / "s000000020-g00000001").rglob("delta-*/arrays/rows/c/0/0"))
    data = bytearray(links[0].read_bytes())
    links[0].write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ValueError, match="damaged"):
        read_table(run, commit, "users")
    links[0].write_bytes(data)
    read_table(run, commit, "users")
    path = run / "commit" / f"{commit}.json"
    document = read_sealed(path)
    document["tables"][0]["deltas"].reverse()
    del document["sha256"]
    path.write_bytes(seal(document))
    with pytest.raises(ValueError, match="damaged"):
        read_table(run, commit, "users")


def test_zarr_opens_the_changed_rows(incremental: tuple[Path, dict[str, np.ndarray]]) -> None:
    import zarr

    run, expected = incremental
    for part in read_sealed(run / "commit" / "s000000030-g00000001.json")["tables"][0]["deltas"][1]["parts"]:
        arrays: Any = [zarr.open(str(run / file["path"]), mode="r") for file in part["files"]]
        ids, rows, _ = (array[:] for array in arrays)
        np.testing.assert_array_equal(rows, expected["rows"][ids])


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps whose first commit is full and whose others are incremental."""
    chain = CheckpointConfig(every_steps=1, num_to_keep=None, full_every=3)
    path = tmp_path_factory.mktemp("page") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("podembed.orchestrator.run.opening.choose_buckets", lambda job: (1, 64, 4))
        return Path(train(small_data, path, max_steps=3, checkpoint_config=chain).path)


@pytest.mark.parametrize(("step", "num_deltas"), [(1, 0), (2, 1), (3, 2)])
def test_a_stranger_reads_what_a_run_has_trained(trained: Path, tmp_path: Path, step: int, num_deltas: int) -> None:
    commit = f"s{step:09d}-g00000001"
    document = read_sealed(trained / "commit" / f"{commit}.json")
    state = open_commit(f"{trained}@{commit}")
    # One host has all buckets.
    assert [table["buckets_per_file"] for table in document["tables"]] == [1, 8, 4]
    for table in document["tables"]:
        assert len(table["deltas"]) == num_deltas
        out = tmp_path / "table.npy"
        export(state, table["name"], format="npy", out=str(out), with_slots=True, force=True)
        records = np.load(out)
        read = read_table(trained, commit, table["name"])
        assert tuple(read) == records.dtype.names
        for array, values in read.items():
            np.testing.assert_array_equal(values, records[array])
    parameters, moments, count = read_dense_model(trained, commit)
    assert (document["step"], count) == (step, step)
    ours = {leaf.key: checkpoint_files.read_dense(state.store, leaf) for leaf in state.manifest.dense}
    for name, values in parameters.items():
        np.testing.assert_array_equal(values, ours[f"params/{name}"])
        assert {(m[name].dtype, m[name].shape) for m in moments.values()} == {(values.dtype, values.shape)}


def test_a_stranger_repeats_adams_first_step_with_what_it_read(trained: Path, small_data: str) -> None:
    """The moments after one step tell its gradient, and with that where the parameters came from: the first values of
    the job.
    """
    job = small_job(folder=small_data, audit=False)
    first = job.model.init(jax.random.key(job.seed), job.data.num_dense, job.widths)
    parameters, moments, _ = read_dense_model(trained, "s000000001-g00000001")
    assert parameters.keys() == first.keys()
    for name, values in parameters.items():
        gradient = moments["mu"][name] / 0.1
        assert np.abs(gradient).max() > 0
        np.testing.assert_allclose(moments["nu"][name], 0.001 * gradient**2, rtol=1e-4, atol=1e-12)
        moved = np.asarray(first[name]) - 1e-2 * gradient / (np.abs(gradient) + 1e-8)
        np.testing.assert_allclose(values, moved, rtol=1e-4, atol=1e-5)


def test_a_stranger_reads_leaves_of_every_form(tmp_path: Path) -> None:
    leaves = {
        "params/scale": np.array(2.5, np.float64),
        "params/nothing": np.empty((3, 0), np.float32),
        "params/half": np.array([[1.5, -2.0, 0.0]], ml_dtypes.bfloat16),
        "params/user tower/0/w": np.arange(24, dtype=np.int8).reshape(2, 3, 4),
        "params/mask": np.array([True, False]),
    }
    tables = {"users": random_table(1, num_rows=5, num_buckets=2, widths={"rows": 3})}
    store, lease_of_run = create_run(tmp_path / "run", tables)
    commit_tables(store, lease_of_run, 1, tables, dense=leaves)
    for key, values in leaves.items():
        read = read_leaf(tmp_path / "run", "s000000001-g00000001", key)
        assert read.shape == values.shape
        np.testing.assert_array_equal(read, values.astype(read.dtype))


class Gate(NamedTuple):
    w: jax.Array
    b: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["w", "more"], meta_fields=[])
@dataclasses.dataclass
class Tower:
    w: jax.Array
    more: dict


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, *children: jax.Array) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array, ...]) -> Pair:
        return cls(*children)


X: Any = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"top": [{"w": X, "b": X}, {"w": X}]}, ["/top/0/b", "/top/0/w", "/top/1/w"]),
        ({"both": (X, X), "none": None, "empty": {}}, ["/both/0", "/both/1"]),
        ({"gate": Gate(X, X), "tower": Tower(X, {"k": X})}, ["/gate/w", "/gate/b", "/tower/w", "/tower/more/k"]),
        ({"pair": Pair(X, X)}, ["/pair/0", "/pair/1"]),
        ({"user tower": X, "a/b": X, "Z": X}, ["/user tower", "/a/b", "/Z"]),
        ({7: X, 10: X}, ["/7", "/10"]),
        (X, [""]),
    ],
)
def test_leaves_have_the_keys_that_the_page_says(small_data: str, params: Any, names: list[str]) -> None:
    worker = DeviceWorker(job=small_job(folder=small_data, audit=False), num_samples=8)
    adam = [*(f"optimizer/0/{field}{name}" for field in ("mu", "nu") for name in names), "optimizer/0/count"]
    for optimizer, state in [
        (optax.adam(1e-2), adam),
        (optax.sgd(1e-2), []),
        (optax.adam(optax.constant_schedule(1e-2)), [*adam, "optimizer/1/count"]),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
            [key.replace("optimizer/", "optimizer/1/") for key in adam],
        ),
        (Adam(1e-2).as_optax(), ["optimizer/iterations", "optimizer/learning_rate", *slots(2 * len(names))]),
    ]:
        worker.params, worker.optimizer_state = params, optimizer.init(params)
        assert sorted(worker.dense_arrays()) == sorted([*(f"params{name}" for name in names), *state])


def slots(count: int) -> list[str]:
    return [f"optimizer/slots/{position}" for position in range(count)]


def test_a_strangers_head_is_ours(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    assert find_head(tmp_path / "run") is None
    leases = [take(store)]
    assert find_head(tmp_path / "run") is None
    for step in (10, 20, 30):
        leases[-1].publish(f"s{step:09d}-g{len(leases):08d}", b"{}")
        assert find_head(tmp_path / "run") == lease_files.read_head(store)
        leases.append(take(store))
        assert find_head(tmp_path / "run") == lease_files.read_head(store) == leases[-1].head


@pytest.mark.parametrize("pattern", ["tables/users/rows/c.1.0.0", "tables/items/v/c.0.0.0", "dense/w/c/0/0"])
def test_a_stranger_finds_damage(run: Path, pattern: str) -> None:
    path = run / "data" / "s000000025-g00000002" / pattern
    data = bytearray(path.read_bytes())
    data[5] ^= 16
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        _ = (
            [read_table(run, "s000000025-g00000002", name) for name in TABLES],
            read_leaf(run, "s000000025-g00000002", "w"),
        )


def test_a_stranger_finds_a_damaged_manifest(run: Path) -> None:
    path = run / "commit" / "s000000025-g00000002.json"
    path.write_bytes(path.read_bytes().replace(b'"step":25', b'"step":26'))
    with pytest.raises(ValueError, match="damaged"):
        read_table(run, "s000000025-g00000002", "users")


def listed_members(section: str) -> set[str]:
    """Every word in code style or as a JSON member of one section of the page."""
    text = PAGE.read_text().split(f"## {section}")[1].split("\n## ")[0]
    return set(re.findall(r'"(\w+)":', text)) | set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize(
    ("section", "records"),
    [
        (
            "4.",
            [
                manifest.Manifest,
                checkpoint_files.TableFiles,
                checkpoint_files.ArrayFiles,
                checkpoint_files.DenseFile,
                checkpoint_files.DeltaFiles,
                checkpoint_files.DeltaPart,
            ],
        ),
        (
            "7.",
            [
                run_record.RunRecord,
                run_record.TableRecord,
                run_record.WarmStartRecord,
                holder.Claim,
                holder.Holder,
                lease_files.BaseRecord,
                holder.Heartbeat,
                job_settings.SettingsRecord,
                job_settings.SettingChange,
                history.Window,
                history_record.HistoryRecord,
                history_record.RecordedEvaluation,
            ],
        ),
    ],
)
def test_the_page_names_every_member(section: str, records: list[type]) -> None:
    members = {field.name for record in records for field in dataclasses.fields(record)}
    assert members - listed_members(section) == set()


def test_the_example_of_the_page_has_exactly_the_members_of_a_manifest() -> None:
    example = json.loads(PAGE.read_text().split("```json\n")[1].split("```")[0])
    assert set(example) == {field.name for field in dataclasses.fields(manifest.Manifest)}
    assert set(example["tables"][0]) == {field.name for field in dataclasses.fields(checkpoint_files.TableFiles)}
    assert set(example["tables"][0]["arrays"][0]) == {
        field.name for field in dataclasses.fields(checkpoint_files.ArrayFiles)
    }
    assert set(example["dense"][0]) == {field.name for field in dataclasses.fields(checkpoint_files.DenseFile)}
    (delta,) = example["tables"][0]["deltas"]
    assert set(delta) == {field.name for field in dataclasses.fields(checkpoint_files.DeltaFiles)}
    assert set(delta["parts"][0]) == {field.name for field in dataclasses.fields(checkpoint_files.DeltaPart)}
    for file in delta["parts"][0]["files"]:
        assert set(file) == {field.name for field in dataclasses.fields(checkpoint_files.DenseFile)}
        size = {"int64": 8, "float32": 4}[file["dtype"]] * int(np.prod(file["shape"]))
        assert (file["shape"][0], file["size_bytes"]) == (column(delta["parts"][0]["counts"], "<i4").sum(), size + 4)
    table = example["tables"][0]
    assert table["rows_per_bucket"] == -(-table["num_rows"] // table["num_buckets"])
    per_file, bucket_bytes = table["buckets_per_file"], table["rows_per_bucket"] * table["dim"] * 4
    assert table["chunks"]["rows"]["size_bytes"] == per_file * (bucket_bytes + 4) + 16 * per_file + 4
