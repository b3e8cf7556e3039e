from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from podembed.workers.data.columns import DataConfigError, DenseColumn, IdColumn, Label, Negatives
from podembed.workers.data.config import ParquetData


def test_short_forms_stand_for_the_long_ones() -> None:
    short = ParquetData("a.parquet", label="y", dense=("x",), features={"user": "user_id"})
    long = ParquetData(("a.parquet",), label="y", dense=(DenseColumn("x"),), features={"user": IdColumn("user_id")})
    assert short == long
    assert short.columns == ("y", "x", "user_id")


def test_a_column_read_twice_is_named_once() -> None:
    features = {"a": IdColumn("id"), "b": IdColumn("id", "hash", 10)}
    data = ParquetData("a", label="y", dense=("y",), features=features, sample_weight="w", sample_id="id")
    assert data.columns == ("y", "id", "w")


def test_one_label_and_several() -> None:
    one = ParquetData("a", label="click")
    assert [label.name for label in one.label_columns] == ["click"]
    assert one.column_shapes == {}
    several = ParquetData("a", labels=("click", Label("buy", missing="mask")), binary_labels=True)
    assert several.label == "click"
    assert several.columns == ("click", "buy")
    assert list(several.column_shapes) == ["buy"]
    assert [label.num_classes for label in several.label_columns] == [2, None]
    assert replace(several, label="buy").label == "buy"
    assert pickle.loads(pickle.dumps(several)) == several  # noqa: S301 - our own bytes, a moment old


def test_data_may_have_no_label() -> None:
    data = ParquetData("a", dense=("price",))
    assert (data.label, data.label_columns, data.columns, data.column_shapes) == ("", (), ("price",), {})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"labels": "click"}, r"labels='click'. Expected a tuple"),
        ({"labels": ("click", "click")}, r"Expected each label once"),
        ({"label": "buy", "labels": ("click",)}, r"label='buy' and labels \['click'\]"),
        ({"labels": (3,)}, r"labels=\(3,\). Expected a tuple of names"),
    ],
)
def test_labels_that_cannot_be_meant_are_refused(labels: dict[str, Any], message: str) -> None:
    with pytest.raises(DataConfigError, match=message):
        ParquetData("a", **labels)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"name": ""}, "name of a column"),
        ({"name": "buy", "missing": "zero"}, r"'zero' as missing of label 'buy'.*'mask'"),
        ({"name": "buy", "num_classes": 1}, "num_classes=1 for label 'buy'. Expected at least 2"),
    ],
)
def test_a_label_that_cannot_be_meant_is_refused(label: dict[str, Any], message: str) -> None:
    with pytest.raises(DataConfigError, match=message):
        Label(**label)


def test_missing_defaults_follow_the_mode() -> None:
    assert IdColumn("c").missing == "empty"
    assert IdColumn("c", mode="hash").missing == "zero"
    assert IdColumn("c", mode="hash", missing="empty").missing == "empty"


def test_resolved_takes_order_and_sizes_from_the_model() -> None:
    data = ParquetData("a", label="y", features={"b": IdColumn("bb", "hash", salt=4)})
    resolved = data.resolved({"a": 10, "b": 20})
    assert list(resolved.id_columns.items()) == [
        ("a", IdColumn("a", vocabulary_size=10)),
        ("b", IdColumn("bb", "hash", 20, salt=4)),
    ]
    assert resolved.resolved({"a": 10, "b": 20}) == resolved


@pytest.mark.parametrize(
    ("sizes", "message"), [({"a": 10}, "only features of the model"), ({"b": 7}, "7 in its table")]
)
def test_resolved_refuses_what_the_model_contradicts(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(DataConfigError, match=message):
        ParquetData("a", label="y", features={"b": IdColumn("b", vocabulary_size=8)}).resolved(sizes)


@pytest.mark.parametrize(
    ("negatives", "is_taken"),
    [
        (Negatives(0, given=9), True),
        (Negatives(2), False),
        (Negatives(0, evaluation="all"), False),
        (Negatives(0, given=9, log_frequency=True), False),
    ],
)
def test_of_keys_that_come_and_go_nothing_is_drawn(negatives: Negatives, is_taken: bool) -> None:
    data = ParquetData("a", label="y", features={"a": IdColumn("a", negatives=negatives)})
    if is_taken:
        assert data.resolved({"a": 10}, {"a": "any"}).id_columns["a"].negatives == negatives
    else:
        with pytest.raises(DataConfigError, match="none that are drawn or counted, since its keys change"):
            data.resolved({"a": 10}, {"a": "any"})


def test_an_order_by_time_is_that_of_sorted_files() -> None:
    with pytest.raises(DataConfigError, match=r"order='time' of ParquetData.*Sort them by time.*order='files'"):
        ParquetData("a", label="y", order="time")  # pyright: ignore[reportArgumentType]


def test_evaluation_swaps_the_files_alone() -> None:
    data = ParquetData("train", label="y", dense=("x",), eval_paths="test")
    assert data.for_evaluation() == ParquetData("test", label="y", dense=("x",))
    with pytest.raises(DataConfigError, match="no eval_paths"):
        data.for_evaluation().for_evaluation()


def test_a_declaration_travels_between_processes() -> None:
    data = ParquetData("a", label="y", features={"b": IdColumn("b", "hash", 20)})
    assert pickle.loads(pickle.dumps(data)) == data  # noqa: S301 - our own bytes, a moment old


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: DenseColumn("x", "sqrt"), "'sqrt' as transform of dense column 'x'"),  # type: ignore[arg-type]
        (lambda: IdColumn("x", "raw"), "'raw' as mode of id column 'x'"),  # type: ignore[arg-type]
        (lambda: IdColumn("x", missing="drop"), "'drop' as missing"),  # type: ignore[arg-type]
        (lambda: IdColumn("x", vocabulary_size=0), "at least 1"),
        (lambda: IdColumn("x", "hash", 1), "at least 2"),
        (lambda: ParquetData((), label="y"), "no paths"),
        (lambda: ParquetData("a", label="y", dense=("x", DenseColumn("x", "log1p"))), r"\['x'\] more than once"),
        (lambda: ParquetData("a", label="y", dense="xy"), "dense='xy'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_meant_is_refused(declare, message: str) -> None:
    with pytest.raises(DataConfigError, match=message):
        declare()
