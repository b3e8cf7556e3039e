"""Values that travel once: by their key while a function is packed, and whole everywhere else."""

import copy
import pickle

import pytest

from podembed.embedding.tf.replicas.kept import Kept, collecting, forget_kept, keep


@pytest.fixture(autouse=True)
def nothing_kept():
    forget_kept()
    yield
    forget_kept()


def unpacked_of(packed):
    return pickle.loads(packed)  # noqa: S301 - of this process


def copied(value):
    return unpacked_of(pickle.dumps(value))


def test_a_value_travels_whole_where_nobody_collects():
    one = Kept(["x" * 1_000])
    found = copy.deepcopy(one)
    assert (found.value, found.key) == (one.value, one.key)
    assert found.value is not one.value


def test_while_values_are_collected_the_key_travels_alone():
    one, other = Kept("x" * 1_000), Kept("y")
    with collecting() as found:
        packed = pickle.dumps({"twice": [one, one], "and": other})
    assert len(packed) < 300
    assert found == {one.key: one, other.key: other}
    with pytest.raises(RuntimeError, match="does not hold"):
        unpacked_of(packed)
    # What is sent ahead is packed outside.
    keep(copied([one, other]))
    unpacked = unpacked_of(packed)
    assert unpacked["and"].value == "y"
    assert unpacked["twice"][0] is unpacked["twice"][1]
    forget_kept()
    with pytest.raises(RuntimeError, match="does not hold"):
        unpacked_of(packed)


def test_collections_do_not_meet():
    one, other = Kept(1), Kept(2)
    with collecting() as outer:
        with collecting() as inner:
            pickle.dumps(one)
        pickle.dumps(other)
    assert (set(inner), set(outer)) == ({one.key}, {other.key})
