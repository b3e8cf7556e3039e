"""Reading one feature's value: every accepted type becomes the same rows of ids, and what does not fit is refused by
name.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.features.inputs import Sparse, read_input, with_weight


def rows_of(found):
    return [found.ids[a:b].tolist() for a, b in zip(found.row_splits[:-1], found.row_splits[1:], strict=True)]


LISTS = [[3, 1], [], [2, 2, 0], [5]]
SPLITS = [0, 2, 2, 5, 6]
VALUES = [3, 1, 2, 2, 0, 5]
INDICES = [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [3, 0]]


@pytest.mark.parametrize(
    "value",
    [
        Ragged.of_lists(LISTS),
        Ragged(np.array(VALUES, np.int32), np.array(SPLITS, np.int32)),
        Ragged(jnp.array(VALUES), jnp.array(SPLITS)),
        Sparse(INDICES, VALUES, (4, 3)),
        Sparse(np.array(INDICES)[::-1], np.array(VALUES)[::-1], np.array([4, 3])),
        sp.coo_matrix((VALUES, np.array(INDICES).T), shape=(4, 3)),
        sp.csr_matrix((VALUES, np.array(INDICES)[:, 1], SPLITS), shape=(4, 3)),
        sp.csc_array(sp.coo_array((VALUES, np.array(INDICES).T), shape=(4, 3))),
        pa.array(LISTS),
        pa.array([[3, 1], None, [2, 2, 0], [5]], pa.large_list(pa.int32())),
        pa.chunked_array([pa.array(LISTS[:2], pa.list_(pa.int64())), pa.array(LISTS[2:])]),
        pa.array([[9], *LISTS]).slice(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rows_are_the_same_from_every_type(value):
    found = read_input("f", value)
    assert rows_of(found) == LISTS
    assert found.ids.dtype == found.row_splits.dtype == np.int64


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_dense_ids_of_any_integer_become_int64(dtype):
    found = read_input("f", np.array([[7], [1]], dtype))
    assert (rows_of(found), found.shape, found.ids.dtype) == ([[7], [1]], (2, 1), np.int64)
    assert rows_of(read_input("f", jnp.array([7, 1]))) == [[7], [1]]


def test_large_ids_do_not_wrap():
    assert read_input("f", np.array([2**33 + 5])).ids.tolist() == [2**33 + 5]
    # Beyond int64 an id stays huge instead of turning negative.
    assert read_input("f", np.array([2**64 - 1], np.uint64)).ids.tolist() == [2**63 - 1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array([1.0, 2.0]), "ids of dtype float64"),
        (jnp.array([1.0]), "ids of dtype float32"),
        (np.array([True]), "ids of dtype bool"),
        (np.array(["1"]), "ids of dtype <U1"),
        ("text", "unknown type <class 'str'>"),
        (None, "unknown type"),
        (3, "unknown type <class 'int'>"),
        (Ragged(np.array([1.5]), np.array([0, 1])), "float64"),
        (Ragged(np.array([1, 2]), np.array([0, 1])), r"row_splits \[0, 1\] over 2 ids"),
        (Ragged(np.array([1, 2]), np.array([1, 2])), "start at 0"),
        (Ragged(np.array([1, 2]), np.array([0, 2, 1, 2])), "never to fall"),
        (Ragged(np.array([1, 2]), np.array([], np.int64)), "at least one integer"),
        (Ragged(np.array([1, 2]), np.array([0.0, 2.0])), "row_splits of dtype float64"),
        (Ragged(np.array([[1, 2]]), np.array([0, 2])), "Only rank 2 ragged tensor is supported"),
        (Sparse([[0, 0]], [1, 2], (2, 2)), "integer indices"),
        (Sparse([[0]], [1], (2, 2)), "integer indices"),
        (Sparse([[0, 2]], [1], (2, 2)), r"index \[0, 2\] in a sparse value of dense_shape \(2, 2\)"),
        (Sparse([[-1, 0]], [1], (2, 2)), "Expected indices inside it"),
        (Sparse([[0, 0]], [1.0], (2, 2)), "ids of dtype float64"),
        (Sparse([[0, 0]], [1], None), "dense_shape None"),
        (Sparse([[0, 0]], [1], (2.5, 2)), r"dense_shape \(2.5, 2\)"),
        (Sparse(np.zeros((0, 2)), [], (-2, 2)), r"dense_shape \(-2, 2\)"),
        (np.ma.masked_array([1, 2], mask=[False, True]), "masked array"),
        (pa.table({"clicks": [1]}), "a pyarrow Table"),
        (sp.coo_matrix(([1.0], ([0], [0]))), "ids of dtype float64"),
        (pa.array([1, 2]), "Expected a list array"),
        (pa.array([[1, None]]), "missing values"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_path(value, text):
    with pytest.raises(ValueError, match=text) as caught:
        read_input("clicks/0", value)
    assert "clicks/0" in str(caught.value)


def test_tracers_are_refused():
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda ids: read_input("f", ids).ids)(jnp.array([1]))


def test_empty_values_of_any_dtype_are_no_ids():
    assert rows_of(read_input("f", Ragged(np.array([]), np.array([0, 0, 0])))) == [[], []]
    assert rows_of(read_input("f", Sparse(np.zeros((0, 2)), [], (2, 3)))) == [[], []]
    assert rows_of(read_input("f", sp.coo_matrix((3, 2), dtype=np.int64))) == [[], [], []]
    assert read_input("f", np.zeros((0, 1), np.int64)).num_rows == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 99)), max_size=12))
def test_unsorted_sparse_values_keep_their_weights(entries):
    indices = np.array([(row, column) for row, column, _ in entries], np.int64).reshape(-1, 2)
    ids = np.array([i for _, _, i in entries], np.int64)
    weights = Sparse(indices, np.arange(len(entries), dtype=np.float32), (4, 5))
    found = with_weight(read_input("f", Sparse(indices, ids, (4, 5))), weights)
    assert found.weights is not None
    rows = np.repeat(np.arange(4), np.diff(found.row_splits))
    seen = list(zip(rows.tolist(), found.columns.tolist(), found.ids.tolist(), found.weights.tolist(), strict=True))
    assert sorted(seen) == sorted((r, c, i, float(at)) for at, (r, c, i) in enumerate(entries))
    assert [key[:2] for key in seen] == sorted(key[:2] for key in seen)


@pytest.mark.parametrize(
    ("value", "weight", "text"),
    [
        (np.array([1]), np.array([1.0]), "Weight specified for dense input f, which is not allowed"),
        (Ragged.of_lists([[1]]), Sparse([[0, 0]], [1.0], (1, 1)), "does not match type input which is RaggedTensor"),
        (
            Sparse([[0, 0]], [1], (1, 1)),
            Ragged(np.array([1.0]), np.array([0, 1])),
            "does not match type input which is SparseTensor",
        ),
        (Ragged.of_lists([[1]]), np.array([1.0]), "does not match type input which is RaggedTensor"),
        (Ragged.of_lists([[1]]), 2.0, "is type <class 'float'>"),
        (Ragged.of_lists([[1]]), Ragged(np.array([1.0, 2.0]), np.array([0, 2])), r"weights of shape \(2,\)"),
        (Ragged.of_lists([[1]]), Ragged(np.array([np.nan]), np.array([0, 1])), "Found weight nan at position 0 of f"),
        (Ragged.of_lists([[1]]), Ragged(np.array([np.inf]), np.array([0, 1])), "Found weight inf"),
        (Ragged.of_lists([[1]]), Ragged(np.array([1e300]), np.array([0, 1])), r"Found weight 1e\+300"),
        (Ragged.of_lists([[1]]), Ragged(np.array(["a"]), np.array([0, 1])), "Expected numbers"),
        (Ragged.of([1], [0, 1], [0.5]), Ragged(np.array([1.0]), np.array([0, 1])), "inside the Ragged ids"),
        (Ragged(np.array([1]), np.array([0, 1]), np.array([np.nan])), None, "Found weight nan"),
    ],
)
def test_weights_that_do_not_fit_are_refused(value, weight, text):
    with pytest.raises(ValueError, match=text):
        with_weight(read_input("f", value), weight)


@pytest.mark.parametrize(
    ("value", "weight"),
    [
        (Ragged.of_lists([[1, 2]]), Ragged(np.array([0.5, 2.0]), np.array([0, 2]))),
        (pa.array([[1, 2]]), pa.array([[0.5, 2.0]])),
        (Ragged.of_lists([[1, 2]]), pa.array([[0.5, 2.0]])),
        (Ragged.of([1, 2], [0, 2], [0.5, 2.0]), None),
        (Sparse([[0, 0], [0, 1]], [1, 2], (1, 2)), sp.coo_matrix(([0.5, 2.0], ([0, 0], [0, 1])))),
        (Ragged.of_lists([[1, 2]]), Ragged(jnp.array([0.5, 2.0], jnp.bfloat16), [0, 2])),
        (Ragged.of([1, 2], [0, 2], jnp.array([0.5, 2.0], jnp.bfloat16)), None),
        (Ragged.of_lists([[1, 2]]), Ragged(np.array([0.5, 2.0], jnp.float8_e5m2), [0, 2])),
    ],
)
def test_weights_become_float32(value, weight):
    found = with_weight(read_input("f", value), weight).weights
    assert (found.tolist(), found.dtype) == ([0.5, 2.0], np.float32)


def test_entries_of_a_dict_come_row_by_row_in_whatever_order_they_were_put_in():
    ids, weights = sp.dok_array((3, 3), dtype=np.int64), sp.dok_array((3, 3), dtype=np.float32)
    entries = {(0, 0): 3, (1, 1): 5, (1, 2): 7, (2, 0): 1}
    for place in entries:
        weights[place] = entries[place]
    for place in reversed(entries):
        ids[place] = entries[place]
    found = with_weight(read_input("f", ids), weights)
    assert rows_of(found) == [[3], [5, 7], [1]]
    assert found.weights.tolist() == [3.0, 5.0, 7.0, 1.0]


def test_only_the_values_of_a_weight_are_used():
    weight = Ragged(np.array([0.5, 2.0]), np.array([0, 1, 2]))
    assert with_weight(read_input("f", Ragged.of_lists([[1, 2]])), weight).weights.tolist() == [0.5, 2.0]
