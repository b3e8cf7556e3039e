"""`JobConfig`: what is wrong with a declaration is said when it is written, and what follows from it for tables and
features.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import FTRL, SGD, Adagrad, Adam
from podembed.embedding.tf.tpu_embedding.declared import DeclaredTables
from podembed.serving.figures.of_groups import HitRateAt, NDCGAt
from podembed.workers.data.columns import DataConfigError, IdColumn, Negatives
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.ranking import LogLoss, RecallAt
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import choose_buckets, feature_bindings, needs_rows, table_specs
from tests.small_job import DIM, SmallModel, small_job

USERS = TableConfig(100, 4, name="users")
ITEMS = TableConfig(50, 8, name="items", combiner="sum", optimizer=Adam())


def job_of(**changes: Any) -> JobConfig:
    fields: dict[str, Any] = {
        "name": "clicks",
        "features": {
            "user": FeatureConfig(USERS),
            "item": FeatureConfig(ITEMS),
            "friends": FeatureConfig(USERS, combiner="sqrtn"),
        },
        "model": SmallModel(),
        "data": ParquetData("clicks/*.parquet", label="click"),
        "batch_size": 32,
    }
    return JobConfig(**(fields | changes))


def test_tables_are_told_apart_by_identity_and_keep_their_order() -> None:
    job = job_of()
    assert job.tables == (USERS, ITEMS)
    assert job.table_names == ("users", "items")
    assert job.widths == {"user": 4, "item": 8, "friends": 4}


def test_a_table_without_a_name_is_named_by_its_position() -> None:
    features = {
        name: FeatureConfig(TableConfig(10, 4, name=given)) for name, given in (("a", None), ("b", "b"), ("c", None))
    }
    assert job_of(features=features).table_names == ("table_0", "b", "table_2")


@pytest.mark.parametrize("names", [("same", "same"), ("table_1", None)])
def test_two_tables_of_one_name_are_refused(names: tuple[str, str | None]) -> None:
    features = {f"f{at}": FeatureConfig(TableConfig(10, 4, name=name)) for at, name in enumerate(names)}
    with pytest.raises(JobError, match=r"Multiple tables with name .* Give each TableConfig its own"):
        _ = job_of(features=features).table_names


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"initial_accumulator_value": 0.0}, "initial_accumulator_value=0.0"),
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"num_lanes": 0}, "num_lanes=0"),
        ({"batch_size": 40}, "multiple of 16"),
        ({"seed": 1 << 63}, "64 bits"),
        ({"seed": -(1 << 63) - 1}, "64 bits"),
        ({"name": "../clicks"}, "without slashes"),
        ({"name": ".."}, "without slashes"),
    ],
)
def test_sizes_and_names_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        job_of(**changes)


def test_data_and_features_that_disagree_are_refused() -> None:
    with pytest.raises(DataConfigError, match="colour"):
        job_of(data=ParquetData("x", label="y", features={"colour": "colour"}))
    with pytest.raises(DataConfigError, match="vocabulary_size 7"):
        job_of(data=ParquetData("x", label="y", features={"user": IdColumn("user", vocabulary_size=7)}))


def test_data_takes_order_and_sizes_from_the_features() -> None:
    data = job_of(data=ParquetData("x", label="y", features={"item": IdColumn("sku", mode="hash")})).resolved_data
    assert list(data.id_columns) == ["user", "item", "friends"]
    assert [(source.column, source.vocabulary_size) for source in data.id_columns.values()] == [
        ("user", 100),
        ("sku", 50),
        ("friends", 100),
    ]


def test_bindings_say_where_each_feature_looks_up_and_how() -> None:
    user, item, friends = feature_bindings(job_of())
    assert (user.name, user.table, user.combiner) == ("user", 0, "mean")
    assert (item.name, item.table, item.combiner) == ("item", 1, "sum")
    assert (friends.name, friends.table, friends.combiner) == ("friends", 0, "sqrtn")


def test_specs_have_the_tables_own_optimizer_or_the_jobs_and_the_recorded_buckets() -> None:
    job = job_of(optimizer=SGD(0.3), seed=9)
    users, items = table_specs(job, choose_buckets(job))
    assert (users.optimizer, items.optimizer) == (SGD(0.3), Adam())
    assert (users.seed, users.num_rows, items.dim) == (9, 100, 8)
    recorded = table_specs(job, (8, 2))
    assert [spec.layout.num_buckets for spec in recorded] == [8, 2]
    with pytest.raises(ValueError, match="zip"):
        table_specs(job, (8,))


@pytest.mark.parametrize("rule", [Adagrad, FTRL])
@pytest.mark.parametrize("sent", [lambda job: job, lambda job: pickle.loads(pickle.dumps(job))])  # noqa: S301
def test_a_job_has_small_first_accumulators_where_nobody_gave_one(rule: type[Adagrad | FTRL], sent: Any) -> None:
    """Also after a replacement of another argument, and where a job was sent to another process. Step by step,
    TensorFlow's stays.
    """
    users, items = TableConfig(9, 4, name="users"), TableConfig(9, 4, name="items", optimizer=rule(0.3))
    features = {"user": FeatureConfig(users), "item": FeatureConfig(items)}

    def accumulators(**changes: Any) -> list[float]:
        job = sent(replace(job_of(features=features), **changes))
        return [spec.optimizer.slots[0].initial_value for spec in table_specs(job, (None, None)) if spec.optimizer]

    assert accumulators() == [1e-8, 1e-8]
    assert accumulators(optimizer=replace(rule(0.1), learning_rate=0.2)) == [1e-8, 1e-8]
    assert accumulators(optimizer=rule(0.1, initial_accumulator_value=0.1)) == [0.1, 1e-8]
    assert accumulators(initial_accumulator_value=0.5) == [0.5, 0.5]

    assert rule(0.1) == rule(0.1, initial_accumulator_value=0.1)
    stepwise = DeclaredTables.of(features, rule(0.1), needs_optimizer=True).specs(seed=0)
    assert [spec.optimizer.slots[0].initial_value for spec in stepwise if spec.optimizer] == [0.1, 0.1]


def test_large_tables_are_cut_and_small_ones_are_not() -> None:
    large = {"f": FeatureConfig(TableConfig(1_000_000, 64, name="large")), "g": FeatureConfig(USERS)}
    assert choose_buckets(job_of(features=large, optimizer=Adagrad(0.1))) == (512, 1)


def test_small_tables_can_be_cut_in_a_run_that_may_have_many_hosts() -> None:
    """One of the two tables has two of three features. With 64 hosts its owner would work 128 / 3 times the mean."""
    assert choose_buckets(job_of(batch_size=64, num_lanes=64)) == (128, 64)
    assert choose_buckets(job_of(batch_size=64, num_lanes=16)) == (1, 1)


def test_a_reference_leads_to_its_job_and_survives_json() -> None:
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": "/data x", "audit": False})
    job = reference.resolve()
    assert job.name == "small"
    assert job.widths["a"] == DIM
    assert JobReference(**reference.to_json()) == reference


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": "many"}, "Found batch_size='many' for job .* Expected int"),
        ({"batch_size": 2.5}, "Found batch_size=2.5 .* Expected int"),
        ({"batch_size": True}, "Found batch_size=True .* Expected int"),
        ({"dense_learning_rate": "0,1"}, "Expected float"),
        ({"vocabulary_size": "1e6"}, "Expected None or int"),
        ({"model": 3}, "Expected str"),
        ({"vocabulary_size": "None"}, "--set vocabulary_size=null, which is JSON"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        JobReference(function="podembed.jobs.criteo:criteo", arguments={"data": ["x.parquet"], **arguments}).resolve()
    good = {"data": ["x.parquet"], "batch_size": 64, "dense_learning_rate": 1, "vocabulary_size": None}
    assert JobReference(function="podembed.jobs.criteo:criteo", arguments=good).resolve().batch_size == 64


def test_arguments_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(TypeError):
        JobReference(function="tests.small_job:small_job", arguments={"folder": object()}).to_json()


def test_a_job_is_a_value() -> None:
    job = small_job(folder="x")
    with pytest.raises(AttributeError):
        job.batch_size = 3  # type: ignore[misc]
    assert replace(job, seed=4).seed == 4


def with_first_feature(**options: Any) -> JobConfig:
    job = job_of(batch_size=32)
    features = {**job.features, "user": FeatureConfig(job.features["user"].table, **options)}
    return replace(job, features=features)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (8,)),
        ({"max_sequence_length": 5}, (5, 8)),
        ({"max_sequence_length": 1}, (1, 8)),
        ({"output_shape": 32}, (8,)),
        ({"output_shape": (None, 2, 3)}, (2, 3, 8)),
        ({"output_shape": (32, 4), "max_sequence_length": 9}, (4, 8)),
    ],
)
def test_activations_have_the_declared_shape(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    job = with_first_feature(**options)
    width = job.features["user"].table.dim
    assert job.activation_shapes["user"] == (*shape[:-1], width)
    assert job.widths["user"] == width


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((4,), r"None or 32\. Write output_shape=\(None, 4\) for 4 vectors a sample, or leave it out for one"),
        ((4, 3), r"Write output_shape=\(None, 4, 3\) for 12 vectors a sample"),
        ((None, None), r"sizes of at least 1 .* such as output_shape=\(None, 4\)"),
        ((32, 0), r"such as output_shape=\(None, 4\)"),
        ((4, 32), r"Write output_shape=\(None, 4, 32\)"),
    ],
)
def test_an_output_shape_begins_with_the_batch(shape: tuple[int | None, ...], remedy: str) -> None:
    with pytest.raises(JobError, match=f"feature 'user' in a job with batch_size=32.*{remedy}"):
        with_first_feature(output_shape=shape)


def test_tables_whose_rows_must_come_to_the_samples() -> None:
    assert needs_rows(job_of()) == (False, False)
    assert needs_rows(with_first_feature(max_sequence_length=1)) == (True, False)
    assert needs_rows(with_first_feature(output_shape=(None, 1))) == (True, False)
    assert needs_rows(with_first_feature(output_shape=(None,))) == (False, False)


def test_candidates_are_a_sequence_with_room_for_their_negatives() -> None:
    def data(negatives: Negatives) -> ParquetData:
        return ParquetData("clicks/*.parquet", label="click", features={"item": IdColumn("item", negatives=negatives)})

    def features(**shape: Any) -> dict[str, FeatureConfig]:
        return {"user": FeatureConfig(USERS), "item": FeatureConfig(ITEMS, **shape)}

    job = job_of(
        features=features(max_sequence_length=5),
        candidates="item",
        data=data(Negatives(4, evaluation=100)),
        metrics=(HitRateAt(10), RecallAt(5, group_by="user")),
    )
    assert (job.num_candidates, job.evaluation_parts) == (5, 21)
    assert job.group_features == ("sample", "user")
    lists = job_of(features=features(output_shape=(None, 10, 5)), candidates="item", data=data(Negatives(4, given=51)))
    assert (lists.num_candidates, lists.evaluation_parts) == (50, 2)
    assert (job_of().num_candidates, job_of().evaluation_parts) == (0, 1)
    for changes, message in (
        ({"candidates": "city"}, r"Expected a feature of the job. Name one of \['user', 'item', 'friends'\]"),
        ({"candidates": "item"}, r"combined to one vector.*max_sequence_length=5"),
        ({"features": features(), "data": data(Negatives(4))}, r"one vector a sample for feature 'item'.*Negatives\(4"),
        (
            {"features": features(max_sequence_length=4), "data": data(Negatives(4))},
            "room for 4 vectors a sample.*Expected 5",
        ),
        ({"metrics": (HitRateAt(10),)}, "hit_rate@10 without group_by in a job without candidates"),
    ):
        with pytest.raises(JobError, match=message):
            job_of(**changes)


@pytest.mark.parametrize(
    ("rows", "given", "negatives"),
    [(7, {}, Negatives(4)), (0, {"mode": "hash"}, Negatives(4)), (7, {}, Negatives(4, evaluation="all"))],
)
def test_features_of_one_column_draw_the_same_negatives(rows: int, given: Any, negatives: Negatives) -> None:
    def job(
        *, rows: int = 0, negatives: Negatives = negatives, invalid_ids: Any = ("error", "error"), **given: Any
    ) -> JobConfig:
        biases = TableConfig(ITEMS.vocabulary_size + rows, 1, name="biases", invalid_ids=invalid_ids[1])
        items = TableConfig(ITEMS.vocabulary_size, ITEMS.dim, name="items", invalid_ids=invalid_ids[0])
        tables = {"item": items, "bias": biases}
        sources = {name: IdColumn("item", negatives=negatives) for name in tables}
        sources["bias"] = replace(sources["bias"], **given)
        return job_of(
            features={name: FeatureConfig(table, max_sequence_length=5) for name, table in tables.items()},
            data=ParquetData("clicks/*.parquet", label="click", features=sources),
            candidates="item",
        )

    assert job().candidate_features == ("item", "bias")
    with pytest.raises(JobError, match="features 'item' and 'bias' of column 'item', in whose tables"):
        job(rows=rows, **given)
    assert job(invalid_ids=("error", "hash")).candidate_features == ("item", "bias")
    with pytest.raises(JobError, match="in whose tables a value has different rows.*invalid_ids of the table"):
        job(invalid_ids=("drop", "hash"))
    # Lists of files are read for each feature by itself.
    assert job(rows=rows, negatives=Negatives(0, given=5), **given).candidate_features == ("item", "bias")


def test_metrics_group_by_features_of_the_job() -> None:
    metrics = (RecallAt(1, group_by="user"), RecallAt(5, group_by="user"))
    assert job_of(metrics=metrics).group_features == ("user",)
    assert job_of().group_features == ()
    ranked = {
        "features": {"item": FeatureConfig(TableConfig(9, 4, combiner="sum"), max_sequence_length=3)},
        "data": ParquetData(
            "x", label="like", features={"item": IdColumn("item", negatives=Negatives(2, evaluation="all"))}
        ),
        "candidates": "item",
    }
    with pytest.raises(JobError, match=r"recall@5 without group_by beside a full ranking.*HitRateAt\(5\)"):
        job_of(**ranked, metrics=(RecallAt(5),))
    with pytest.raises(JobError, match=r"log_loss beside candidates of an evaluation that are all ids"):
        job_of(**ranked, metrics=(LogLoss(),))
    assert job_of(**ranked, metrics=(NDCGAt(5, group_by="item"), HitRateAt(5))).ranks_all
    with pytest.raises(JobError, match=r"recall@3 that groups by 'city'\. .*\['user', 'item', 'friends'\]"):
        job_of(metrics=(RecallAt(3, group_by="city"),))
    with pytest.raises(JobError, match="Expected distinct names"):
        job_of(metrics=(RecallAt(3, group_by="user"), RecallAt(3, group_by="item")))


def declares_no_rows() -> JobConfig:
    return job_of(features={"user": FeatureConfig(TableConfig(-1, 4, name="users"))})


def raises_by_itself() -> JobConfig:
    raise ValueError("Found nothing that would help")


def test_a_declaration_that_cannot_be_is_told_with_its_line_and_an_error_of_the_function_is_left_alone() -> None:
    name = "tests.workers.job.test_job"
    with pytest.raises(
        JobError, match=r"Found vocabulary_size=-1\. .*declares_no_rows' declares it in .*test_job\.py, line \d+\.$"
    ):
        JobReference(function=f"{name}:declares_no_rows").resolve()
    with pytest.raises(ValueError, match="nothing that would help") as raised:
        JobReference(function=f"{name}:raises_by_itself").resolve()
    assert not isinstance(raised.value, JobError)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_arguments_that_the_record_of_a_run_cannot_give_back_are_refused(value: float) -> None:
    with pytest.raises(JobError, match=r"Found learning_rate=.*the number .*Expected plain JSON values"):
        JobReference(function="podembed.jobs.criteo:synthetic", arguments={"learning_rate": value}).resolve()
