"""Declarations of tables and features: every default, every check, identity and representation."""

# Wrong arguments are passed on purpose.
# pyright: reportArgumentType=false

import math
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, QuantizationConfig, RowIdInitializer, TableConfig
from podembed.embedding.initializers import Constant, TruncatedNormal, row_source
from podembed.embedding.optimizers import SGD


def test_defaults_of_a_table():
    table = TableConfig(10, 4)
    assert (table.vocabulary_size, table.dim, table.combiner, table.name) == (10, 4, "mean", None)
    assert table.initializer == TruncatedNormal(stddev=0.5, mean=0.0)
    assert table.optimizer is None
    assert table.quantization_config is None
    assert table.layout is None
    assert table.dtype == np.float32
    assert table.invalid_ids == "error"


def test_positional_order_of_a_table():
    layout = object()
    quantization = QuantizationConfig(4, 0.0, 1.0)
    initializer = Constant(1.0)
    table = TableConfig(10, 4, initializer, SGD(), "sum", "t", quantization, layout, np.int32)
    assert table.initializer is initializer
    assert table.optimizer == SGD()
    assert (table.combiner, table.name) == ("sum", "t")
    assert table.quantization_config is quantization
    assert table.layout is layout
    assert table.dtype == np.int32


@pytest.mark.parametrize("name", ["vocabulary_size", "dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, None, np.int64(3), "3"])
def test_sizes_are_positive_python_ints(name, value):
    with pytest.raises(ValueError, match=rf"Found {name}=.*Expected a Python int of at least 1"):
        TableConfig(**({"vocabulary_size": 2, "dim": 2} | {name: value}))


def test_true_is_a_size():
    assert TableConfig(True, True).dim == 1


@pytest.mark.parametrize("combiner", ["Mean", " sum", "max", None, 3, ["sum"]])
def test_combiner_is_one_of_three(combiner):
    with pytest.raises(ValueError, match="combiner"):
        TableConfig(2, 2, combiner=combiner)


@pytest.mark.parametrize(
    "arguments",
    [
        {"initializer": 3},
        {"name": 5},
        {"quantization_config": (4, 0, 1)},
        {"dtype": np.float64},
        {"dtype": "no such type"},
        {"invalid_ids": "ignore"},
        {"invalid_ids": None},
    ],
)
def test_other_arguments_of_a_table_are_checked(arguments):
    with pytest.raises(ValueError, match=rf"Found {next(iter(arguments))}="):
        TableConfig(2, 2, **arguments)


def test_optimizer_is_not_checked_here():
    assert TableConfig(2, 2, optimizer="adagrad").optimizer == "adagrad"


def test_tables_are_told_apart_by_identity_and_can_be_filled_in():
    one, other = TableConfig(2, 2, name="t"), TableConfig(2, 2, name="t")
    assert one != other
    assert len({one, other, one}) == 2
    one.name, one.optimizer = "renamed", SGD()
    assert one.name == "renamed"


def test_representation_hides_the_default_initializer():
    assert repr(TableConfig(8, 4, name="t")) == (
        "TableConfig(vocabulary_size=8, dim=4, initializer=None, optimizer=None, combiner='mean', name='t', "
        "quantization_config=None)"
    )
    assert "initializer=Constant(value=2.0)" in repr(TableConfig(8, 4, Constant(2.0)))
    assert "initializer=TruncatedNormal(" in repr(TableConfig(8, 4, TruncatedNormal(stddev=0.1)))
    assert "initializer=None" in repr(TableConfig(8, 3, TruncatedNormal(stddev=1 / math.sqrt(3))))


def test_defaults_and_order_of_a_feature():
    table = TableConfig(4, 2)
    feature = FeatureConfig(table)
    assert feature.table is table
    assert (feature.max_sequence_length, feature.validate_weights_and_indices, feature.output_shape, feature.name) == (
        0,
        True,
        (),
        None,
    )
    feature = FeatureConfig(table, 3, False, (5, None), "f")
    assert (feature.max_sequence_length, feature.validate_weights_and_indices, feature.output_shape, feature.name) == (
        3,
        False,
        (5, None),
        "f",
    )
    assert "max_sequence_length=3" in repr(feature)
    assert "output_shape=(5, None)" in repr(feature)


def test_feature_takes_the_combiner_of_its_table_unless_it_has_one():
    table = TableConfig(4, 2, combiner="sqrtn")
    assert FeatureConfig(table).combiner == "sqrtn"
    assert FeatureConfig(table, combiner="sum").combiner == "sum"
    assert "combiner='sum')" in repr(FeatureConfig(table, combiner="sum"))
    with pytest.raises(ValueError, match="combiner"):
        FeatureConfig(table, combiner="max")


@pytest.mark.parametrize(
    "arguments",
    [
        {"table": "users"},
        {"table": None},
        {"max_sequence_length": -1},
        {"max_sequence_length": 1.5},
        {"max_sequence_length": None},
        {"validate_weights_and_indices": 1},
        {"validate_weights_and_indices": None},
        {"output_shape": (4, -1)},
        {"name": 7},
    ],
)
def test_arguments_of_a_feature_are_checked(arguments):
    with pytest.raises(ValueError, match=r"Found .*Expected"):
        FeatureConfig(**({"table": TableConfig(2, 2)} | arguments))


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (None, ()),
        (4, (4,)),
        ([None, 3], (None, 3)),
        (np.array([2, 3]), (2, 3)),
        ((np.int64(2), 3), (2, 3)),
    ],
)
def test_an_output_shape_is_integers_of_any_kind(given, shape):
    found = FeatureConfig(TableConfig(2, 2), output_shape=given).output_shape
    assert found == shape
    assert all(size is None or type(size) is int for size in found)


@pytest.mark.parametrize("given", ["4", (4, 2.0), 4.0, ["a"]])
def test_an_output_shape_of_something_else_is_a_type_error(given):
    with pytest.raises(TypeError, match=r"Found output_shape=.*Expected integers"):
        FeatureConfig(TableConfig(2, 2), output_shape=given)


@pytest.mark.parametrize(
    ("num_buckets", "lower", "upper"),
    [(1, 0, 1), (2.0, 0, 1), (4, 1, 1), (4, 2, 1), (4, math.nan, 1), (4, None, 1), (4, 0, "1"), (4, 0, math.inf)],
)
def test_quantization_is_checked(num_buckets, lower, upper):
    with pytest.raises(ValueError, match="Found"):
        QuantizationConfig(num_buckets, lower, upper)


def test_quantization_rounds_to_the_nearest_level():
    rows = np.array([[-3.0, -0.9, -0.3, 0.2, 0.9, 5.0]], np.float32)
    QuantizationConfig(3, -1.0, 1.0).apply(rows)
    assert rows.tolist() == [[-1.0, -1.0, 0.0, 0.0, 1.0, 1.0]]


def test_row_id_initializer_fills_rows_with_their_number():
    assert RowIdInitializer(offset=5)(np.array([0, 7]), 2, 0).tolist() == [[5.0, 5.0], [12.0, 12.0]]


@pytest.mark.parametrize(
    ("declare", "remedy"),
    [
        (lambda: TableConfig(0, 4), r"vocabulary_size=0\. .* Pass the number of rows"),
        (lambda: TableConfig(4, -1), r"dim=-1\. .* Pass the number of columns"),
        (lambda: TableConfig("4", 4), r"vocabulary_size='4'\. .* Pass the number of rows"),
        (lambda: TableConfig(np.int64(4), 4), r"Expected a Python int of at least 1\. Pass int\(vocabulary_size\)"),
        (lambda: FeatureConfig(TableConfig(4, 4), max_sequence_length=-1), r"Pass how many rows .* or 0 to combine"),
        (lambda: QuantizationConfig(1, 0.0, 1.0), r"num_buckets=1\. .* at least 2\. Pass the number of levels"),
    ],
)
def test_the_remedy_for_a_whole_number_helps(declare, remedy):
    with pytest.raises(ValueError, match=remedy):
        declare()


def test_a_table_begins_from_an_array():
    rows = np.arange(6.0).reshape(3, 2)
    table = TableConfig(3, 2, initial_rows=rows)
    out = np.zeros((2, 2), np.float32)
    row_source(table.initializer, seed=0, table_name="t", num_rows=3, dim=2)(np.array([2, 0]), out)
    np.testing.assert_array_equal(out, [[4, 5], [0, 1]])
    assert (table.trainable, TableConfig(3, 2, trainable=False).trainable) == (True, False)
    assert TableConfig(3, 2, initial_rows=Path("rows.npy")).initial_rows_path == "rows.npy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_rows": np.zeros((2, 2))}, r"shape \[2, 2\] of float64. Expected \[3, 2\] of floating"),
        ({"initial_rows": np.zeros((3, 2), int)}, r"of int64. Expected \[3, 2\] of floating point"),
        ({"initial_rows": [[0.0, 0.0], [1.0, 2.0], [3.0, np.nan]]}, "not finite in row 2 of initial_rows"),
        ({"initial_rows": 3}, r"shape \[\] of int64"),
        ({"initial_rows": np.zeros((3, 2)), "initializer": Constant(1.0)}, "initial_rows beside initializer=Constant"),
        ({"trainable": 0}, "Found trainable=0. Expected True or False"),
    ],
)
def test_what_is_no_row_of_a_table_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TableConfig(3, 2, **arguments)
