"""Arguments of a job that change between two starts of a run: which may, what is recorded, and that equal values change
nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optax
import pytest

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.optimizers import Adagrad, Adam
from podembed.jobs.chaos.jobs import TinyModel
from podembed.jobs.fitting import fit
from podembed.orchestrator.api.config import ConfigurationError, RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.api.run_errors import WorkerRefused
from podembed.orchestrator.commit.run_record import RunMismatch
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.run.job_settings import changes, check_change, read_settings, record_settings
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.tools.fsck.check import check_run
from podembed.tools.inspect.inspect_run import describe, render
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused
from tests.orchestrator.committed_tables import flip_byte
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import DIM, SmallModel, small_job

FUNCTION = "tests.small_job:small_job"


def begin(folder: str, path: Path, *, epochs: int = 1) -> Result:
    reference = JobReference(function=FUNCTION, arguments={"folder": folder, "epochs": epochs, "audit": False})
    run = create_run(str(path), reference.resolve(), reference)
    return fit(run, scaling=ScalingConfig(in_process=True), config=RunConfig(), reporter=SilentReporter())


def go_on(path: Path, **settings: Any) -> Result:
    run = open_run(str(path), settings=settings)
    return fit(run, scaling=ScalingConfig(in_process=True), config=RunConfig(), reporter=SilentReporter())


def test_a_change_is_recorded_shown_and_kept_and_equal_values_change_no_byte(small_data: str, tmp_path: Path) -> None:
    whole = begin(small_data, tmp_path / "whole", epochs=2)
    path = tmp_path / "run"
    assert begin(small_data, path).step == 20
    result = go_on(path, epochs=2)
    assert (result.step, result.total_steps) == (40, 40)
    assert_same_bytes(committed_state(str(path)), committed_state(whole.path))
    (record,) = read_settings(Store(path))
    assert (record.generation, record.step, record.describe()) == (2, 20, "epochs 1 -> 2")
    assert "From step 20 on epochs 1 -> 2" in render(describe(Store(path), now_unix_s=record.changed_unix_s))
    # A second start keeps it, with or without the flag, and so does the program that began the run.
    assert go_on(path).total_steps == 40
    assert go_on(path, epochs=2).total_steps == 40
    assert begin(small_data, path).total_steps == 40
    assert len(read_settings(Store(path))) == 1
    with pytest.raises(RunMismatch):
        begin(small_data, path, epochs=3)
    flip_byte(path / "settings/g00000002.json", at=20)
    with pytest.raises(DocumentRefused, match=r"settings/g00000002\.json.*or delete it"):
        go_on(path)
    (finding,) = check_run(str(path)).all_findings
    assert "delete the file" in finding.remedy


def test_only_the_newest_record_can_stop_a_run(small_data: str, tmp_path: Path) -> None:
    begin(small_data, tmp_path)
    for generation, epochs in ((2, 2), (3, 3)):
        before, after = ({"folder": small_data, "epochs": count, "audit": False} for count in (epochs - 1, epochs))
        record_settings(Store(tmp_path), before, after, generation=generation, step=20)
    flip_byte(tmp_path / "settings/g00000002.json", at=20)
    assert open_run(str(tmp_path)).job.num_epochs == 3
    (finding,) = check_run(str(tmp_path)).all_findings
    assert finding.file == "settings/g00000002.json"


def test_arguments_that_a_record_could_not_give_back_are_refused_before_it_is_written(
    small_data: str, tmp_path: Path
) -> None:
    begin(small_data, tmp_path)
    for value in (1 << 70,):
        with pytest.raises(JobError, match=r"Found epochs=.* for job .*Expected plain JSON values"):
            open_run(str(tmp_path), settings={"epochs": value})
    # A record that an earlier version wrote with such a number is found by a check, with the way out.
    record_settings(Store(tmp_path), {}, {"epochs": float("nan")}, generation=2, step=20)
    with pytest.raises(DocumentRefused, match="or delete it"):
        open_run(str(tmp_path))
    (finding,) = check_run(str(tmp_path)).all_findings
    assert "delete the file" in finding.remedy


def test_what_may_not_change_is_refused_before_anything_is_written(small_data: str, tmp_path: Path) -> None:
    begin(small_data, tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"--set seed=9.*\n.*seed 3 would be 9, but the order of samples"):
        open_run(str(tmp_path / "run"), settings={"seed": 9})
    assert not (tmp_path / "run/settings").exists()


def test_a_model_that_was_edited_since_is_refused_in_one_sentence_with_the_way_out(
    small_data: str, tmp_path: Path
) -> None:
    begin(small_data, tmp_path)
    run = open_run(str(tmp_path), settings={"epochs": 2})
    edited = replace(run, job=replace(run.job, model=TinyModel(width=32)), reference=None)
    with pytest.raises(WorkerRefused, match=r"is not that of the job\. Found 'params/.*@dense=reinit\.$"):
        fit(edited, scaling=ScalingConfig(in_process=True), config=RunConfig(), reporter=SilentReporter())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("batch_size", 48, "batch_size 96 would be 48, but a step is that many samples"),
        ("num_lanes", 6, "num_lanes 12 would be 6"),
        ("staleness", 1, "staleness 0 would be 1"),
        ("wire_dtype", "bfloat16", "wire_dtype float32 would be bfloat16"),
        ("model", TinyModel(width=32), "parameters would have other names or shapes"),
        ("dense_optimizer", optax.sgd(0.1), "dense optimizer would keep another state"),
    ],
)
def test_what_changes_shapes_or_meaning_is_named_with_its_reason(
    small_data: str, field: str, value: Any, words: str
) -> None:
    before = replace(
        small_job(folder=small_data, audit=False), model=TinyModel(), optimizer=Adagrad(0.05), dense_optimizer=None
    )
    with pytest.raises(ConfigurationError) as refused:
        check_change(before, replace(before, **{field: value}), changes({}, {"x": 1}))
    assert words in str(refused.value)
    assert "Found --set x=1" in str(refused.value)


def test_the_order_of_the_samples_may_not_change(small_data: str) -> None:
    before, after = (small_job(folder=small_data, order=order) for order in ("shuffled", "files"))
    with pytest.raises(ConfigurationError, match="order shuffled would be files, but a step is a position in it"):
        check_change(before, after, changes({}, {"order": "files"}))


def test_tables_may_change_constants_of_their_optimizer_and_nothing_else(small_data: str) -> None:
    before = small_job(folder=small_data, audit=False)

    def with_table(**fields: Any) -> JobConfig:
        table = TableConfig(50, **({"dim": DIM, "combiner": "mean", "name": "a"} | fields))
        return replace(before, features={**before.features, "a": FeatureConfig(table)})

    before = with_table(optimizer=Adagrad(0.05))
    check_change(before, with_table(optimizer=Adagrad(0.2)), [])
    for fields, words in (
        ({"optimizer": Adam(0.1)}, "table 'a' would have other slots (accumulator 8 -> momentum 8, velocity 8)"),
        ({"optimizer": Adagrad(0.05), "dim": 16}, "table 'a' would have other dimension (8 -> 16)"),
        ({"optimizer": Adagrad(0.05), "combiner": "sum"}, "another combiner"),
        ({"quantization_config": QuantizationConfig(4, -1.0, 1.0)}, "another quantization_config"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            check_change(before, with_table(**fields), [])
        assert words in str(refused.value)


def test_the_shape_of_activations_may_not_change(small_data: str) -> None:
    before = small_job(folder=small_data, audit=False)
    sequence = FeatureConfig(before.features["a"].table, max_sequence_length=2)
    with pytest.raises(ConfigurationError, match="another shape"):
        check_change(before, replace(before, features={**before.features, "a": sequence}), [])


def test_the_rows_and_columns_of_the_data_may_not_change(small_data: str) -> None:
    before = small_job(folder=small_data, audit=False)
    data = replace(before.data, features={**before.data.features, "a": "b"})
    with pytest.raises(ConfigurationError, match="the data's features would be another one"):
        check_change(before, replace(before, data=data), [])
    check_change(before, replace(before, data=replace(before.data, max_bad_rows=3)), [])


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": Adagrad(0.2)},
        {"dense_optimizer": optax.adam(5e-4)},
        {"num_epochs": 9},
        {"overlap": False},
        {"model": SmallModel()},
    ],
)
def test_learning_rates_and_epochs_may_change(small_data: str, fields: dict[str, Any]) -> None:
    before = replace(small_job(folder=small_data), optimizer=Adagrad(0.05), dense_optimizer=None)
    check_change(before, replace(before, **fields), [])


def test_changes_tell_types_apart_and_leave_out_what_is_equal() -> None:
    found = changes({"a": 1, "b": 2}, {"a": 1, "b": 2.5, "c": True})
    assert [(one.name, one.before, one.after) for one in found] == [("b", "2", "2.5"), ("c", "", "true")]
    assert changes({"a": 1}, {"a": True}) != []
