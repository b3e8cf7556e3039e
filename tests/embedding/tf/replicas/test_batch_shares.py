"""Batches cut for replicas: every form that `enqueue` takes, without a row lost or doubled."""

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.features.inputs import Sparse, read_input
from podembed.embedding.tf.replicas.batch_shares import rows_of, split_over
from podembed.embedding.tf.replicas.per_replica import PerReplica, local_value
from tests.long_tests import examples

ROWS = [[5, 6], [], [7], [1, 1, 2], [9]]


def as_sparse(rows):
    places = [(row, column) for row, ids in enumerate(rows) for column in range(len(ids))]
    values = [value for ids in rows for value in ids]
    return Sparse(np.array(places, np.int64).reshape(-1, 2), np.array(values, np.int64), (len(rows), 4))


def as_scipy(rows, kind):
    sparse = as_sparse(rows)
    matrix = scipy.sparse.coo_array((sparse.values, tuple(sparse.indices.T)), shape=(len(rows), 4))
    return matrix if kind == "coo" else matrix.asformat(kind)


FORMS = {
    "ragged": Ragged.of_lists,
    "sparse": as_sparse,
    "coo": lambda rows: as_scipy(rows, "coo"),
    "csr": lambda rows: as_scipy(rows, "csr"),
    "csc": lambda rows: as_scipy(rows, "csc"),
    "dok": lambda rows: as_scipy(rows, "dok"),
    "matrix": lambda rows: scipy.sparse.csr_matrix(as_scipy(rows, "csr")),
    "pyarrow": lambda rows: pa.array(rows, pa.list_(pa.int64())),
    "chunked": lambda rows: pa.chunked_array(
        [pa.array(rows[:2], pa.list_(pa.int64())), pa.array(rows[2:], pa.list_(pa.int64()))]
    ),
}


def lists(value):
    """The ids of each row, as `enqueue` reads them."""
    read = read_input("x", value)
    return [read.ids[a:b].tolist() for a, b in zip(read.row_splits[:-1], read.row_splits[1:], strict=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_rows_are_those_of_the_whole_in_every_form(form, num_replicas):
    whole = FORMS[form](ROWS)
    parts = split_over(whole, num_replicas).values
    assert [lists(part) for part in parts] == [
        ROWS[at[0] : at[-1] + 1] if len(at) else [] for at in np.array_split(np.arange(5), num_replicas)
    ]
    assert all(read_input("x", part).kind == read_input("x", whole).kind for part in parts)


def test_entries_of_one_place_stay_apart_in_scipy_matrices():
    # Two ids of one sample may stand at one place; adding them up would make a third id.
    doubled = scipy.sparse.csr_array((np.array([3, 4, 8]), np.array([0, 0, 1]), np.array([0, 2, 3])), shape=(2, 2))
    assert [lists(part) for part in split_over(doubled, 2).values] == [[[3, 4]], [[8]]]
    as_columns = scipy.sparse.coo_array(([3, 4, 8], ([0, 0, 1], [0, 0, 1])), shape=(2, 2))
    assert [lists(part) for part in split_over(as_columns, 2).values] == [[[3, 4]], [[8]]]


def test_places_keep_their_columns_and_higher_axes():
    value = Sparse([[2, 1, 3], [0, 0, 1], [1, 2, 0], [2, 0, 0]], [7, 8, 9, 6], (3, 3, 4))
    first, second = split_over(value, 2).values
    assert (first.indices.tolist(), first.values.tolist(), first.dense_shape) == (
        [[0, 0, 1], [1, 2, 0]],
        [8, 9],
        (2, 3, 4),
    )
    assert (second.indices.tolist(), second.values.tolist(), second.dense_shape) == (
        [[0, 1, 3], [0, 0, 0]],
        [7, 6],
        (1, 3, 4),
    )


def test_weights_labels_and_nested_structures():
    batch = {
        "weights": Ragged(np.array([0.5, 2.0, 1.5], np.float32), np.array([0, 2, 2, 3])),
        "inside": Ragged(np.array([1, 2]), np.array([0, 0, 1, 2]), np.array([3.0, 4.0], np.float32)),
        "none": None,
        "labels": (jnp.arange(3), np.array([[1.0], [2.0], [3.0]])),
        "done": PerReplica((1, 2)),
    }
    parts = split_over(batch, 2)
    assert parts["none"] is None
    first, second = local_value(parts, 0), local_value(parts, 1)
    assert first["weights"].values.tolist() == [0.5, 2.0]
    assert (second["inside"].values.tolist(), second["inside"].weights.tolist()) == ([2], [4.0])
    assert (first["labels"][0].tolist(), second["labels"][1].tolist()) == ([0, 1], [[3.0]])
    assert (first["done"], second["done"]) == (1, 2)


def test_rows_of_one_sample_stay_together():
    rows = Ragged.of_lists([[sample, row] for sample in range(3) for row in range(2)])
    parts = split_over({"x": rows, "y": np.arange(3)}, 2, num_samples=3)
    assert [part.to_lists() for part in parts["x"].values] == [[[0, 0], [0, 1], [1, 0], [1, 1]], [[2, 0], [2, 1]]]
    assert [part.tolist() for part in parts["y"].values] == [[0, 1], [2]]
    with pytest.raises(ValueError, match="Found 6 rows at 'x'.*4 samples"):
        split_over({"x": rows}, 2, num_samples=4)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=9), st.integers(1, 5))
@settings(max_examples=examples(60), deadline=None)
def test_parts_together_are_the_whole(rows, num_replicas):
    for form in ("ragged", "sparse"):
        parts = split_over(FORMS[form](rows), num_replicas).values
        assert [row for part in parts for row in lists(part)] == rows
        sizes = [len(lists(part)) for part in parts]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": 3}, "Found <class 'int'> at 'x'"),
        ({"x": np.array(3)}, "Found <class 'numpy.ndarray'> at 'x'.*first axis"),
        ({"x": [1, 2]}, "Found <class 'int'> at 'x/0'.*lists of numbers as arrays"),
        ({"x": "abc"}, "Found <class 'str'> at 'x'"),
        ({"x": Ragged(np.array([1, 2]), np.array([0, 1]))}, r"row_splits \[0, 1\] over 2 ids for x"),
        ({"x": Sparse([[5, 0]], [1], (2, 1))}, r"index \[5, 0\].*dense_shape \(2, 1\)"),
        ({"x": PerReplica((1, 2, 3))}, "Found 3 values of replicas at 'x'.*Expected 2"),
    ],
)
def test_what_cannot_be_cut_is_named(batch, text):
    with pytest.raises(ValueError, match=text):
        split_over(batch, 2)


def test_no_rows_at_all():
    for form, make in FORMS.items():
        if form != "chunked":
            empty = rows_of("x", make(ROWS), 0, 0)
            assert lists(empty) == [], form
    assert rows_of("x", np.zeros((3, 2)), 0, 0).shape == (0, 2)
