"""`podembed export --layout sparsecore` and `podembed import` on a run that was really trained, and a run that begins
from what comes back.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import FTRL
from podembed.orchestrator.api.config import CheckpointConfig, WarmStart
from podembed.workers.job.job import JobConfig
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import DIM, small_job
from tests.training import fit_job

STEPS = 4


def sparsecore_job(folder: str) -> JobConfig:
    """The small job with Adagrad, Adam and FTRL: one optimizer a table, each with slots as wide as rows."""
    job = small_job(folder=folder, audit=False)
    bags = TableConfig(300, DIM, name="bags", combiner="mean", optimizer=FTRL(0.05))
    bag_features = {"bag": FeatureConfig(bags), "other_bag": FeatureConfig(bags, combiner="sqrtn")}
    return replace(job, features={**job.features, **bag_features})


def train(path: Path, data: str, warm_start: WarmStart | None = None, *, steps: int = STEPS) -> Path:
    fit_job(
        sparsecore_job(data),
        path.parent,
        name=path.name,
        max_steps=steps,
        warm_start=warm_start,
        checkpoint_config=CheckpointConfig(every_steps=1000),
    )
    return path


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("sparsecore") / "run", small_data)


def test_a_run_goes_out_and_comes_back(podembed, trained: Path, small_data: str, tmp_path: Path) -> None:
    flags = ("--layout", "sparsecore", "--slots", "--out", tmp_path / "out")
    code, out, err = podembed("export", trained, *flags, "--chips", 16, "--cores", 2)
    assert (code, err) == (0, "")
    assert "a: rows, accumulator [256, 8] of a" in out
    assert "bags: rows, accumulator, linear [512, 8] of bags" in out
    assert "for 32 SparseCores" in out
    code, out, _ = podembed("import", tmp_path / "out", "--out", tmp_path / "back")
    assert code == 0
    assert f"podembed train --warm-start {tmp_path / 'back'} --warm-start-rules @dense=reinit" in out
    tables = {name: values for name, values in committed_state(str(trained)).items() if not name.startswith("dense/")}
    assert_same_bytes(tables, {name: committed_state(str(tmp_path / "back"))[name] for name in tables})

    code, out, _ = podembed("diff", trained, tmp_path / "back")
    assert code == 1
    assert re.findall(r" (\d+) of ", out.split("Dense")[0]) == ["0"] * 8, out
    assert podembed("fsck", tmp_path / "back")[0] == 0
    code, out, _ = podembed("inspect", tmp_path / "back")
    assert (code, "Imported tables without a job" in out) == (0, True)
    code, _, err = podembed("resume", tmp_path / "back")
    assert (code, "Found imported tables without a job" in err) == (87, True)

    rules = ("@dense=reinit",)
    one = train(tmp_path / "one", small_data, WarmStart(source=str(trained), rules=rules))
    other = train(tmp_path / "other", small_data, WarmStart(source=str(tmp_path / "back"), rules=rules))
    assert_same_bytes(committed_state(str(one)), committed_state(str(other)))


def test_a_models_own_layout(podembed, trained: Path, tmp_path: Path) -> None:
    flags = ("--layout", "sparsecore", "--out")
    code, out, _ = podembed("export", trained, *flags, tmp_path / "both", "--chips", 2, "--cores", 4, "--stack", "a,b")
    assert (code, "of a, b\n" in out) == (0, True)
    assert podembed("export", trained, *flags, tmp_path / "one", "--chips", 2, "--cores", 4, "--table", "b")[0] == 0
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["b", "embedding_spec.pb", "export.json"]
    spec = tmp_path / "one" / "embedding_spec.pb"
    assert podembed("export", trained, *flags, tmp_path / "other", "--spec", spec)[0] == 0
    one, other = ((tmp_path / name / "b" / "table.npy").read_bytes() for name in ("one", "other"))
    assert one == other


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--layout", "sparsecore"), "without --chips and --cores"),
        (("--layout", "sparsecore", "--chips", "4"), "without --chips and --cores"),
        (("--layout", "sparsecore", "--chips", "4", "--cores", "2", "--spec", "x"), "with --spec beside other flags"),
        (("--layout", "sparsecore", "--chips", "4", "--cores", "0"), "Expected at least one of both"),
        (("--layout", "sparsecore", "--chips", "4", "--cores", "2", "--force"), "Found --force with --layout"),
        (("--layout", "sparsecore", "--format", "parquet"), "Found --format parquet with --layout"),
        (("--layout", "sparsecore", "--chips", "4", "--cores", "2", "--stack", "a,x"), "no table of the commit"),
        (("--layout", "sparsecore", "--spec", "/dev/null"), "Expected an EmbeddingSpecProto"),
        (("--table", "a", "--chips", "4"), "Found --chips without --layout sparsecore"),
        (("--table", "a", "--spec", "x"), "Found --spec without --layout sparsecore"),
        ((), "no --table without --layout sparsecore"),
    ],
)
def test_flags_that_do_not_fit(podembed, trained: Path, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    code, _, err = podembed("export", trained, "--out", tmp_path / "out", *flags)
    assert (code, message in err) == (87, True), err
    assert not (tmp_path / "out").exists()
