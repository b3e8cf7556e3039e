"""The two built-in jobs as declarations."""

from __future__ import annotations

import inspect

import pytest

from podembed.embedding.optimizers import RowWiseAdagrad
from podembed.jobs.built_in import BUILT_IN_JOBS
from podembed.jobs.criteo import COLUMN_NAMES, criteo, synthetic
from podembed.jobs.models.dcn_v2 import DCNv2
from podembed.jobs.models.dlrm import DLRM
from podembed.jobs.papers.click_logs import dcn_v2, dlrm
from podembed.jobs.synthetic import DEFAULT_FOLDER
from podembed.workers.data.columns import DenseColumn
from podembed.workers.job.job import JobError
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import choose_buckets, table_specs


@pytest.mark.parametrize("columns", COLUMN_NAMES)
def test_criteo_declares_13_numbers_and_26_tables(columns: str) -> None:
    job = criteo(data=["day_*.parquet"], eval_data=["test.parquet"], columns=columns, vocabulary_size=1_000, dim=8)
    numbers, fields = COLUMN_NAMES[columns]
    assert tuple(column.name for column in job.data.dense if isinstance(column, DenseColumn)) == numbers
    assert tuple(job.features) == fields
    assert len(job.tables) == len(set(job.table_names)) == 26
    assert {table.dim for table in job.tables} == {8}
    assert job.data.eval_paths == ("test.parquet",)
    assert isinstance(job.model, DLRM)
    assert job.optimizer == RowWiseAdagrad(0.05)
    assert all(spec.num_rows == 1_000 for spec in table_specs(job, choose_buckets(job)))


def test_equal_values_of_two_fields_are_hashed_differently() -> None:
    salts = [source.salt for source in criteo(data=["x"]).data.id_columns.values()]
    assert len(set(salts)) == 26


def test_unknown_column_names_are_refused() -> None:
    with pytest.raises(JobError, match=r"Found columns='mine'\. Expected one of \['podembed', 'torchrec'\]"):
        criteo(data=["x"], columns="mine")


def test_the_arguments_survive_json_so_that_a_run_can_be_resumed() -> None:
    reference = JobReference(
        function=BUILT_IN_JOBS["criteo"], arguments={"data": ["a", "b"], "columns": "torchrec", "epochs": 2}
    )
    again = JobReference(**reference.to_json())
    assert again.resolve().num_epochs == 2
    assert again.to_json() == reference.to_json()


@pytest.mark.parametrize(("name", "model"), [("dlrm", DLRM), ("dcn_v2", DCNv2)])
def test_models_of_papers_are_jobs_of_their_own_names(name: str, model: type) -> None:
    arguments = {"data": ["a"], "vocabulary_size": 1_000, "batch_size": 64, "seed": 3, "learning_rate": 0.5}
    job = JobReference(function=BUILT_IN_JOBS[name], arguments=arguments | {"order": "files"}).resolve()
    same = criteo(**arguments, order="files", model=name)  # type: ignore[arg-type]
    assert (job.name, type(job.model)) == (name, model)
    assert (job.data, job.optimizer, job.batch_size, job.seed) == (same.data, same.optimizer, 64, 3)
    assert [table.vocabulary_size for table in job.tables] == [1_000] * 26


@pytest.mark.parametrize("function", [dlrm, dcn_v2])
def test_models_of_papers_take_the_arguments_of_criteo(function: object) -> None:
    taken, of_criteo = (dict(inspect.signature(one).parameters) for one in (function, criteo))  # type: ignore[arg-type]
    del of_criteo["model"]
    assert taken == of_criteo


@pytest.mark.parametrize("function", [synthetic, criteo, dlrm, dcn_v2])
def test_jobs_are_functions_of_plain_keyword_arguments(function: object) -> None:
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.annotation != inspect.Parameter.empty


def test_the_generated_set_lies_where_its_generator_writes_it() -> None:
    assert inspect.signature(synthetic).parameters["folder"].default == str(DEFAULT_FOLDER)
