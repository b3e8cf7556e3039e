"""Real runs that begin from another run's commit: what arrives, with other numbers of hosts and buckets, and before the
first commit.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.initializers import row_source
from podembed.jobs.fitting import fit
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError, RunConfig, ScalingConfig, WarmStart
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.api.run_errors import WorkerRefused
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.run_record import RunMismatch, WarmStartRecord, read_run
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.orchestrator.run.warm_start import WarmStartRefused
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import choose_buckets, table_specs
from podembed.workers.storage.store import Store
from tests.jobs.cli.test_main import run as podembed
from tests.long_tests import is_long
from tests.orchestrator.driver.test_equality import expected_audit
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import small_job
from tests.training import fit_job

SOURCE_STEPS = 13
STEPS = 6
BUCKETS = (4, 32, 2, 1)  # of the source's tables a, b, bags, audit; a new run chooses 1, 8, 1, 1


def job_of(folder: str, change: str = "nothing", *, seed: int = 3) -> JobReference:
    arguments = {"folder": folder, "change": change, "seed": seed}
    return JobReference(function="tests.orchestrator.run.warm_jobs:changed_job", arguments=arguments)


def train(
    reference: JobReference, path: Path, warm_start: WarmStart | None = None, *, num_hosts: int = 1, steps: int = STEPS
) -> Result:
    return fit_job(
        reference,
        path.parent,
        name=path.name,
        num_hosts=num_hosts,
        max_steps=steps,
        warm_start=warm_start,
        checkpoint_config=CheckpointConfig(every_steps=1000),
    )


def train_source(folder: str, path: Path, *, steps: int) -> Result:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("podembed.orchestrator.run.opening.choose_buckets", lambda job: BUCKETS)
        return train(job_of(folder), path, steps=steps)


@pytest.fixture(scope="module")
def source(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of one host whose tables are cut into other numbers of buckets than a new run would choose."""
    result = train_source(small_data, tmp_path_factory.mktemp("source") / "old", steps=SOURCE_STEPS)
    assert [table.num_buckets for table in read_run(Store(result.path)).tables] == [*BUCKETS]
    return result.path


@pytest.fixture(scope="module")
def warm(source: str, small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(job_of(small_data), tmp_path_factory.mktemp("warm") / "new", WarmStart(source=source))


def test_everything_arrives_in_tables_that_are_cut_differently(source: str, warm: Result, small_data: str) -> None:
    before, after = committed_state(source), committed_state(warm.path)
    job = small_job(folder=small_data)
    assert choose_buckets(job) != BUCKETS
    assert sorted(warm.losses) == list(range(STEPS)), "the new run counts from step 0"
    # Six steps touch few rows of a large table; the others must be the source's, with their slots.
    same = (before["b/rows"] == after["b/rows"]).all(axis=1)
    assert 0.9 < same.mean() < 1.0
    for slot in ("b/momentum", "b/velocity"):
        assert (before[slot][same] == after[slot][same]).all()
        assert (after[slot][same] != 0).any()
    # Adam of the dense parameters has counted on.
    counts = {name: int(value) for name, value in after.items() if value.ndim == 0 and name.endswith("count")}
    assert set(counts.values()) == {SOURCE_STEPS + STEPS}
    visits = expected_audit(job, SOURCE_STEPS) + expected_audit(job, STEPS)
    np.testing.assert_allclose(after["audit/rows"][:, 0], visits, atol=1e-4)


def test_where_a_run_began_is_written_down(source: str, warm: Result) -> None:
    head = checkpoint.load_head(Store(source))
    assert head is not None
    expected = WarmStartRecord(location=source, run_id=head.run_id, commit=head.name, rules=())
    assert read_run(Store(warm.path)).warm_start == expected


@is_long
@pytest.mark.ray
def test_three_hosts_begin_with_the_state_of_one(
    ray_cluster: None, source: str, warm: Result, small_data: str, tmp_path: Path
) -> None:
    result = train(job_of(small_data), tmp_path / "new", WarmStart(source=source), num_hosts=3)
    losses = [[run.losses[step] for step in range(STEPS)] for run in (result, warm)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    one, other = committed_state(result.path), committed_state(warm.path)
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_run_that_was_lost_before_its_first_commit_begins_there_again(
    source: str, warm: Result, small_data: str, tmp_path: Path
) -> None:
    """And from the commit that was the newest when it was created, though there is a newer one now."""
    old = shutil.copytree(source, tmp_path / "old")
    reference = job_of(small_data)
    create_run(str(tmp_path / "new"), reference.resolve(), reference, warm_start=WarmStart(source=str(old)))
    train_source(small_data, old, steps=SOURCE_STEPS + 2)
    result = fit(
        open_run(str(tmp_path / "new")),
        scaling=ScalingConfig(in_process=True),
        config=RunConfig(max_steps=STEPS),
        reporter=SilentReporter(),
    )
    assert result.losses == warm.losses
    assert_same_bytes(committed_state(result.path), committed_state(warm.path))
    # The same program again: "the newest" was decided, and now the run's own commits count.
    again = train(reference, tmp_path / "new", WarmStart(source=str(old)), steps=STEPS + 1)
    assert sorted(again.losses) == [STEPS]
    shutil.rmtree(old)
    again = train(reference, tmp_path / "new", WarmStart(source=str(old)), steps=STEPS + 2)
    assert sorted(again.losses) == [STEPS + 1], "what it began from is no longer needed"


def test_another_beginning_is_another_run(source: str, warm: Result, small_data: str) -> None:
    for other in (None, WarmStart(source=source, rules=("@dense=reinit",))):
        with pytest.raises(RunMismatch, match="warm_start"):
            train(job_of(small_data), Path(warm.path), other)


def test_a_beginning_that_is_gone_or_damaged_is_named(source: str, small_data: str, tmp_path: Path) -> None:
    old, reference = shutil.copytree(source, tmp_path / "old"), job_of(small_data)
    create_run(str(tmp_path / "new"), reference.resolve(), reference, warm_start=WarmStart(source=str(old)))
    victim = next(old.glob("data/*/tables/b/rows/c.3.0.0"))
    victim.unlink()
    with pytest.raises(ConfigurationError, match=r"Found no file in .*b/rows/c.3.0.0 of .*podembed fsck"):
        train(reference, tmp_path / "new", WarmStart(source=str(old)))
    with pytest.raises(ConfigurationError, match="b/rows/c.3.0.0"):
        create_run(str(tmp_path / "other"), reference.resolve(), reference, warm_start=WarmStart(source=str(old)))
    shutil.rmtree(old)
    with pytest.raises(ConfigurationError, match="Found no run in"):
        train(reference, tmp_path / "new", WarmStart(source=str(old)))


def test_changed_tables_need_rules(source: str, small_data: str, tmp_path: Path) -> None:
    reference = job_of(small_data, "tables")
    with pytest.raises(WarmStartRefused) as refused:
        train(reference, tmp_path / "new", WarmStart(source=source))
    found = "\n".join(refused.value.differences)
    for difference in (
        "table 'letters' is not in the commit (letters=reinit begins it anew, letters=rename=OLD loads another)",
        "table 'b' has an optimizer with slots none",
        "table 'bags' has dimension 4, in the commit 8 (bags=reinit begins it anew)",
        "table 'fresh' is not in the commit",
        "table 'a' of the commit is not in the job",
    ):
        assert difference in found
    assert len(refused.value.differences) == 5
    # Every table fits, but rows of 'a' are those of other values.
    reference = job_of(small_data, "hashed")
    with pytest.raises(WarmStartRefused) as refused:
        train(reference, tmp_path / "new", WarmStart(source=source))
    (hashed,) = refused.value.differences
    assert hashed.startswith("table 'a': feature 'a' (column 'a'): found mode=\"hash\", expected \"as_is\" (a=reinit")
    with pytest.raises(WarmStartRefused, match="the rule @accept=b2 names no table of the job"):
        train(reference, tmp_path / "new", WarmStart(source=source, rules=("@accept=a", "@accept=b2")))
    assert not (tmp_path / "new").exists()


def test_the_command_begins_with_rules(source: str, small_data: str, tmp_path: Path) -> None:
    reference = job_of(small_data, "tables")
    head = checkpoint.load_head(Store(source))
    assert head is not None
    arguments = ["train", "--job", reference.function, "--set", f"folder={small_data}", "change=tables"]
    arguments += ["--in-process", "--max-steps", "1", "--storage", str(tmp_path), "--name", "new"]
    arguments += ["--warm-start", f"{source}@{head.name}", "--warm-start-rules"]
    rules = ["letters=rename=a", "b=rows", "bags=reinit", "fresh=reinit", "@dense=reinit"]
    code, out, err = podembed(*arguments, *rules)
    assert code == 0, err
    assert f"Warm start from {head.name} of run {head.run_id}" in out
    assert "b (rows alone)" in out
    before, after = committed_state(source), committed_state(str(tmp_path / "new"))
    assert (before["b/rows"] == after["b/rows"]).all(axis=1).mean() > 0.99
    assert "b/momentum" not in after
    same = (before["a/rows"] == after["letters/rows"]).all(axis=1)
    assert same.any()
    assert (before["a/accumulator"][same] == after["letters/accumulator"][same]).all()
    spec = next(spec for spec in table_specs(reference.resolve(), (None,) * 5) if spec.name == "bags")
    fresh = np.empty((300, 4), np.float32)
    fill = row_source(spec.initializer, seed=spec.seed, table_name="bags", num_rows=spec.num_rows, dim=spec.dim)
    fill(np.arange(300), fresh)
    assert (fresh == after["bags/rows"]).all(axis=1).mean() > 0.2
    assert {int(value) for name, value in after.items() if value.ndim == 0 and name.endswith("count")} == {1}


@pytest.mark.parametrize(
    ("change", "rule", "steps_counted"), [("model", "@dense=reinit", {1}), ("dense optimizer", "@dense=params", set())]
)
def test_another_dense_model_needs_a_rule(
    source: str, small_data: str, tmp_path: Path, change: str, rule: str, steps_counted: set[int]
) -> None:
    reference = job_of(small_data, change, seed=4)
    with pytest.raises(
        WorkerRefused, match=r"dense model of the commit.*Found dense arrays.*@dense=reinit, or @dense=params"
    ):
        train(reference, tmp_path / "refused", WarmStart(source=source))
    result = train(reference, tmp_path / "new", WarmStart(source=source, rules=(rule,)), steps=1)
    before, after = committed_state(source), committed_state(result.path)
    counts = {int(value) for name, value in after.items() if value.ndim == 0 and name.endswith("count")}
    assert counts == steps_counted
    change_of_hidden = np.abs(before["dense/params/hidden"] - after["dense/params/hidden"]).max()
    assert (change_of_hidden < 0.05) == (rule == "@dense=params")


def test_rules_without_a_run_are_refused(small_data: str, tmp_path: Path) -> None:
    arguments = ["train", "--job", "tests.small_job:small_job", "--set", f"folder={small_data}", "--in-process"]
    code, _, err = podembed(*arguments, "--storage", str(tmp_path / "runs"), "--warm-start-rules", "a=reinit")
    assert (code, "Pass --warm-start RUN" in err) == (87, True)
    code, _, err = podembed(*arguments, "--storage", str(tmp_path / "runs"), "--warm-start", str(tmp_path / "none"))
    assert (code, "Found no run in" in err) == (87, True)
    assert not (tmp_path / "runs").exists()
