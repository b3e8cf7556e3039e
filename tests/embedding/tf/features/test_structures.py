"""Nested structures: order, paths, types, and which difference is which error."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.tf.features.structures import flatten, flatten_with_paths, pack_like, require_same_structure

Pair = namedtuple("Pair", ["left", "right"])
STRUCTURES = st.recursive(
    st.integers(),
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), children, max_size=3)
        | st.tuples(children, children).map(lambda pair: Pair(*pair))
    ),
    max_leaves=8,
)


def test_dicts_come_in_sorted_order_and_paths_join_keys_and_positions():
    structure = {"c": {"z": 1, "a": 2}, "b": [3, (4, Pair(5, 6))], "a": None}
    assert flatten_with_paths(structure) == [
        ("a", None),
        ("b/0", 3),
        ("b/1/0", 4),
        ("b/1/1/left", 5),
        ("b/1/1/right", 6),
        ("c/a", 2),
        ("c/z", 1),
    ]
    assert flatten_with_paths(7) == [("", 7)]


@given(STRUCTURES)
def test_packing_undoes_flattening_and_keeps_types(structure):
    packed = pack_like(structure, flatten(structure))
    assert packed == structure
    assert type(packed) is type(structure)
    require_same_structure(structure, packed, "gradients")


def test_dict_types_and_the_order_of_keys_are_kept():
    ordered = OrderedDict([("b", 1), ("a", 2)])
    packed = pack_like(ordered, ["A", "B"])
    assert isinstance(packed, OrderedDict)
    assert list(packed.items()) == [("b", "B"), ("a", "A")]
    counting = pack_like(defaultdict(list, {"a": 1}), [2])
    assert counting == {"a": 2}
    assert counting["new"] == []


@pytest.mark.parametrize(
    ("expected", "found", "error", "text"),
    [
        ((1, 2), [1, 2], TypeError, "found a list. Expected a tuple"),
        ([1, 2], (1, 2), TypeError, "found a tuple. Expected a list"),
        ((1, 2), {"a": 1, "b": 2}, TypeError, "found a dict"),
        ({"a": 1}, [1], TypeError, "found a list"),
        (Pair(1, 2), (1, 2), TypeError, "Expected a Pair"),
        ((1, 2), (1, 2, 3), ValueError, "found 3 elements. Expected 2"),
        ({"a": 1}, {"b": 1}, ValueError, r"unknown keys \['b'\] and missing keys \['a'\]"),
        ({"a": 1}, {"a": 1, "b": 1}, ValueError, "unknown keys"),
        ((1, 2), None, ValueError, "found None"),
        (1, [1], ValueError, "found a list of 1. Expected a single value"),
        ({"a": (1, [2])}, {"a": (1, [2, 3])}, ValueError, "at 'a/1'"),
        ({"a": (1, [2])}, {"a": (1, (2,))}, TypeError, "at 'a/1'"),
        ((1, [2]), (1, (2,), 3), TypeError, "at '1': found a tuple"),
        (Pair(1, 2), namedtuple("Pair", "left middle")(1, 2), TypeError, r"a Pair\(left, middle\). Expected a Pair\("),
    ],
)
def test_differences_are_told_apart(expected, found, error, text):
    with pytest.raises(error, match=text):
        require_same_structure(expected, found, "features")


def test_none_is_a_leaf_and_any_dict_is_a_dict():
    require_same_structure({"a": (1, 2)}, OrderedDict(a=(None, None)), "weights")


def test_keys_that_cannot_be_sorted_are_refused():
    with pytest.raises(TypeError, match="Use strings"):
        flatten({1: 2, "a": 3})
