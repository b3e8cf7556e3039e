"""`fsck` of what a loop of one's own saved: every file's damage is found and named, and what is whole is called so."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.checkpoint import Checkpoint
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.reference import open_run_store
from podembed.tools.fsck.saved import CheckedSave, check_saves, render
from podembed.workers.stepwise.checkpoint import saved_paths
from tests.jobs.cli.test_main import run as podembed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, and beside them an embedding alone."""
    folder = tmp_path_factory.mktemp("saved")
    with LocalStrategy().scope():
        embedding = TPUEmbedding({"x": FeatureConfig(TableConfig(50, 3, name="t"))}, 4, Adagrad(0.1))
    model = {"a": np.arange(4.0, dtype=np.float32), "b": np.zeros((2, 0))}
    checkpoint = Checkpoint(model=model, embedding=embedding, step=5)
    checkpoint.save(folder / "all")
    checkpoint.save(folder / "all")
    Checkpoint(model=model).write(folder / "without")
    embedding.save(str(folder / "embedding"))
    embedding.close()
    return folder


def checked(path: Path) -> CheckedSave:
    (one,) = check_saves(saved_paths(str(path)))
    return one


def test_what_is_whole_is_called_so_with_what_it_holds(folder: Path) -> None:
    first, second = check_saves(saved_paths(str(folder / "all")))
    assert first.is_intact
    assert second.is_intact
    assert [first.location[-6:], second.location[-6:]] == ["ckpt-1", "ckpt-2"]
    assert first.holds == "part 'model', part 'embedding', part 'step', table 't'"
    files = [file for file in (folder / "all/ckpt-1/data").rglob("*") if file.is_file()]
    assert (first.num_files, first.num_bytes) == (len(files), sum(file.stat().st_size for file in files))
    assert (checked(folder / "without").holds, checked(folder / "embedding").holds) == ("part 'model'", "table 't'")
    assert "No damage found" in render([first, second])


@pytest.mark.parametrize("kind", ["all/ckpt-1", "without", "embedding"])
def test_every_file_that_is_changed_cut_or_missing_is_found_and_named(kind: str, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder / kind, copy)
    for file in [file for file in copy.rglob("*") if file.is_file()]:
        data, name = file.read_bytes(), str(file.relative_to(copy))
        flips = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, len(data) // 2, len(data) - 1)]
        for damaged in [*flips, data[:-1], data + b"\n"]:
            file.write_bytes(damaged)
            save = checked(copy)
            assert [damage.name for damage, _ in save.damages] == [name]
            assert f"{copy}/{name}" in render([save])
        file.unlink()
        save = checked(copy) if saved_paths(str(copy)) else None
        assert save is None or [damage.name for damage, _ in save.damages] == [name]
        file.write_bytes(data)
    assert checked(copy).is_intact


def test_a_chunk_that_is_damaged_is_told_with_its_table_and_rows(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "embedding", tmp_path / "copy")
    chunk = next(file for file in (tmp_path / "copy").rglob("*") if file.is_file() and "/c/" in str(file))
    chunk.write_bytes(b"")
    ((_, place),) = checked(tmp_path / "copy").damages
    assert "table 't'" in place
    assert "rows" in place


def test_what_no_reader_uses_is_no_damage(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "all", tmp_path / "all")
    (tmp_path / "all/ckpt-2/checkpoint.json").unlink()
    (tmp_path / "all/ckpt-1/data/extra").write_bytes(b"x")
    first, second = check_saves(saved_paths(str(tmp_path / "all")))
    assert first.is_intact
    assert second.is_intact
    assert (first.num_unnamed, second.kind) == (1, "interrupted save")
    assert second.num_unnamed > 1
    assert "Left over" in render([first, second])


def test_the_command_takes_them_and_says_what_it_does_not(folder: Path, tmp_path: Path) -> None:
    code, out, err = podembed("fsck", str(folder / "all"))
    assert (code, "No damage found" in out) == (0, True), err
    shutil.copytree(folder / "without", tmp_path / "copy")
    next(file for file in (tmp_path / "copy/data").rglob("*") if file.is_file()).write_bytes(b"")
    code, out, _ = podembed("fsck", str(tmp_path / "copy"))
    assert (code, "1 damage found" in out) == (1, True)
    code, _, err = podembed("fsck", str(folder / "all"), "--all")
    assert (code, "only runs have commits" in err) == (87, True)
    with pytest.raises(
        ConfigurationError, match="no run in.*`TPUEmbedding` or `Checkpoint` saved.*`podembed fsck` checks it"
    ):
        open_run_store(str(folder / "all"))
