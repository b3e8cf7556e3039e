"""Files of a checkpoint of the step-by-step mode: there as a whole or not at all, and read with suspicion."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.checkpoint import Checkpoint, CheckpointPartsMismatch, latest_checkpoint
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.workers.stepwise.checkpoint import CHECKPOINT_STORAGE
from podembed.workers.stepwise.saved_index import AlreadySaved, NothingSaved
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, seal


class Killed(BaseException):
    """Ends a save at one place, as a kill would: nothing catches it."""


@pytest.fixture
def checkpoint():
    with LocalStrategy().scope():
        embedding = TPUEmbedding({"x": FeatureConfig(TableConfig(50, 3, name="t"))}, 4, Adagrad(0.1))
    yield Checkpoint(model={"a": np.arange(4.0, dtype=np.float32), "b": np.zeros((2, 0))}, embedding=embedding, step=5)
    embedding.close()


def index_of(path):
    return json.loads((Path(path) / "checkpoint.json").read_text())


def test_a_save_that_ends_anywhere_leaves_no_checkpoint(checkpoint, tmp_path, monkeypatch):
    first = checkpoint.save(tmp_path)
    num_writes = 0
    whole = {name: getattr(Store, name) for name in ("write_new", "create_exclusive")}

    def limited(name, left):
        def call(store, *arguments):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return whole[name](store, *arguments)

        return call

    while True:
        left = [num_writes]
        for name in whole:
            monkeypatch.setattr(Store, name, limited(name, left))
        try:
            path = checkpoint.save(tmp_path)
            break
        except Killed:
            num_writes += 1
            assert latest_checkpoint(tmp_path) == first
            for name, original in whole.items():
                monkeypatch.setattr(Store, name, original)
            if num_writes > 1:
                left_behind = f"{tmp_path}/ckpt-{num_writes}"
                with pytest.raises(NothingSaved, match=r"save that was interrupted leaves"):
                    checkpoint.restore(left_behind)
    # Each interrupted save that wrote something has a number that is never used again.
    assert num_writes == len([file for file in Path(path).rglob("*") if file.is_file()])
    assert latest_checkpoint(tmp_path) == path == f"{tmp_path}/ckpt-{num_writes + 1}"
    assert checkpoint.restore(path)["step"] == 5


def test_a_killed_process_leaves_no_checkpoint(tmp_path):
    program = """
        import os, signal, sys
        import numpy as np
        from podembed.embedding.tf.tpu_embedding.checkpoint import Checkpoint
        from podembed.workers.storage.store import Store
        folder = sys.argv[1]
        checkpoint = Checkpoint(model=np.ones(3, np.float32))
        checkpoint.save(folder)
        Store.create_exclusive = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.save(folder)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "ckpt-2" / "data").is_dir()
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-1"
    assert Checkpoint(model=np.zeros(3, np.float32)).restore(f"{tmp_path}/ckpt-1")["model"].tolist() == [1, 1, 1]
    with pytest.raises(NothingSaved):
        Checkpoint(model=np.zeros(3, np.float32)).restore(f"{tmp_path}/ckpt-2")
    with CHECKPOINT_STORAGE.next_path(str(tmp_path)) as path:
        assert path == f"{tmp_path}/ckpt-3"


def test_of_two_writers_of_one_place_one_wins(checkpoint, tmp_path, monkeypatch):
    path = str(tmp_path / "both")
    create = Store.create_exclusive

    def after_another(store, name, data):
        monkeypatch.setattr(Store, "create_exclusive", create)
        Checkpoint(step=1).write(path)
        return create(store, name, data)

    monkeypatch.setattr(Store, "create_exclusive", after_another)
    with pytest.raises(AlreadySaved):
        checkpoint.write(path)
    assert Checkpoint(step=0).restore(path) == {"step": 1}


def test_every_flipped_file_and_every_missing_one_is_found(checkpoint, tmp_path):
    path = Path(checkpoint.save(tmp_path))
    expected = checkpoint.embedding.read_tables()
    # A `zarr.json` is for other readers: here the index says shape and dtype.
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "zarr.json"]
    assert len(files) > 4
    for file in files:
        content = file.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
            with pytest.raises(StorageError):
                checkpoint.restore(path)
        file.unlink()
        with pytest.raises(StorageError):
            checkpoint.restore(path)
        file.write_bytes(content)
    checkpoint.restore(path)
    for found, one in zip(checkpoint.embedding.read_tables().values(), expected.values(), strict=True):
        np.testing.assert_array_equal(found["rows"], one["rows"])


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("arrays"),
        lambda d: d.pop("parts"),
        lambda d: d.pop("embedding"),
        lambda d: d.update(embedding=3),
        lambda d: d.update(parts="model"),
        lambda d: d.update(format_version=2),
        lambda d: d["arrays"].append(d["arrays"][0]),
        lambda d: d["arrays"][0].update(path="../../etc"),
        lambda d: d["arrays"][0].update(dtype="object"),
        lambda d: d["arrays"][0].update(dtype=["float32"]),
        lambda d: d["arrays"][0].update(shape=[-4]),
        lambda d: d["arrays"][0].update(shape=[0]),
        lambda d: d["arrays"][0].update(size_bytes=0),
        lambda d: d["arrays"][0].update(shape=[1 << 62, 1 << 62]),
        lambda d: d["arrays"][1].update(shape=[4, 1]),
        lambda d: d["embedding"].update(num_steps=-1),
    ],
)
def test_an_index_that_says_something_else_is_refused(checkpoint, tmp_path, change):
    path = Path(checkpoint.save(tmp_path))
    document = index_of(path)
    document.pop("sha256")
    change(document)
    (path / "checkpoint.json").write_bytes(seal(document))
    with pytest.raises((StorageError, CheckpointPartsMismatch)):
        checkpoint.restore(path)


def test_a_document_of_another_kind_is_refused(checkpoint, tmp_path):
    path = Path(checkpoint.save(tmp_path))
    (path / "checkpoint.json").write_bytes(b"[]")
    with pytest.raises(DocumentRefused):
        checkpoint.restore(path)


def test_a_saved_embedding_is_read_by_its_own_method(checkpoint, tmp_path):
    path = str(tmp_path / "embedding")
    checkpoint.embedding.save(path)
    with pytest.raises(NothingSaved, match=r"Found a saved embedding.*TPUEmbedding.restore"):
        checkpoint.restore(path)
    checkpoint.embedding.restore(path)


def test_other_readers_find_the_arrays(checkpoint, tmp_path):
    path = Path(checkpoint.save(tmp_path))
    found = {entry["key"]: zarr.open_array(path / entry["path"], mode="r") for entry in index_of(path)["arrays"]}
    assert set(found) == {"model/a", "model/b", "step"}
    np.testing.assert_array_equal(np.asarray(found["model/a"]), np.arange(4.0))
    assert int(np.asarray(found["step"])) == 5


def test_the_latest_is_the_last_number_that_is_finished(tmp_path):
    assert latest_checkpoint(tmp_path / "nothing") is None
    checkpoint = Checkpoint(step=1)
    for _ in range(11):
        checkpoint.save(tmp_path)
    for other in ("ckpt-x", "ckpt-012", "other-13", "ckpt-14x"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "checkpoint.json").write_text("{}")
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-11"
    shutil.rmtree(tmp_path / "ckpt-11")
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-10"
    # Somebody's own file of such a name is none, and no save goes there.
    (tmp_path / "ckpt-100").write_text("mine")
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-10"
    assert checkpoint.save(tmp_path) == f"{tmp_path}/ckpt-101"
    assert (tmp_path / "ckpt-100").read_text() == "mine"


def test_threads_that_save_at_once_take_a_number_each(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(lambda number: Checkpoint(step=number).save(tmp_path), range(12)))
    assert sorted(paths) == sorted(f"{tmp_path}/ckpt-{number}" for number in range(1, 13))
    assert sorted(Checkpoint(step=0).restore(path)["step"] for path in paths) == list(range(12))


def test_the_home_folder_is_meant_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    path = Checkpoint(step=3).save("~/saved")
    assert (tmp_path / "home" / "saved" / "ckpt-1" / "checkpoint.json").is_file()
    assert latest_checkpoint(Path("~/saved")) is not None
    assert Checkpoint(step=0).restore(path)["step"] == 3
    assert not (tmp_path / "~").exists()


def test_in_an_object_store(checkpoint, s3_url):
    path = checkpoint.save(s3_url)
    assert (path, latest_checkpoint(s3_url)) == (f"{s3_url}/ckpt-1", path)
    checkpoint.step = 0
    assert checkpoint.restore(path)["step"] == 5
    assert checkpoint.save(s3_url).endswith("/ckpt-2")
