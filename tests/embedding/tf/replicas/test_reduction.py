"""Values of replicas made one, by the rules of `tf.distribute.Strategy.reduce`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.tf.replicas.cross_replica import CrossReplica
from podembed.embedding.tf.replicas.per_replica import PerReplica
from podembed.embedding.tf.replicas.reduction import ReduceOp
from podembed.embedding.tf.replicas.replica_context import ReplicaContext, in_replica


class Replicas(CrossReplica):
    def __init__(self, count):
        self._count = count

    @property
    def num_replicas_in_sync(self):
        return self._count


two = Replicas(2)


@pytest.mark.parametrize("name", [ReduceOp.SUM, "sum", "SUM", "Sum"])
def test_names_of_the_operation(name):
    assert two.reduce(name, PerReplica((1.5, 2.0)), axis=None) == 3.5


def test_place_by_place():
    # The example of TensorFlow's page: two replicas, {'a': 1, 'b': [40, 1]} and {'a': 3, 'b': [2, 98]}.
    values = PerReplica(({"a": 1, "b": np.array([40, 1])}, {"a": 3, "b": np.array([2, 98])}))
    summed, mean = two.reduce("SUM", values), two.reduce("MEAN", values, axis=None)
    assert (summed["a"], summed["b"].tolist()) == (4, [42, 99])
    assert (mean["a"], mean["b"].tolist()) == (2.0, [21.0, 49.5])


def test_over_the_batch_with_uneven_replicas_every_element_counts_once():
    values = PerReplica((np.array([1.0, 2.0, 3.0], np.float32), np.array([10.0], np.float32)))
    assert two.reduce("SUM", values, axis=0) == 16.0
    assert two.reduce("MEAN", values, axis=0) == 4.0
    assert two.reduce("MEAN", values, axis=0).dtype == np.float32
    matrices = PerReplica((np.ones((3, 2)), np.zeros((1, 2))))
    assert two.reduce("MEAN", matrices, axis=0).tolist() == [0.75, 0.75]
    assert two.reduce("MEAN", matrices, axis=(0, 1)) == 0.75
    assert two.reduce("SUM", matrices, axis=-2).tolist() == [3.0, 3.0]
    # A replica without samples, as of the last batch, and none with any.
    assert two.reduce("MEAN", PerReplica((np.array([4.0]), np.zeros(0))), axis=0) == 4.0
    assert np.isnan(two.reduce("MEAN", PerReplica((np.zeros(0), np.zeros(0))), axis=0))
    # As in TensorFlow the mean of integers is a true division.
    assert two.reduce("MEAN", PerReplica((np.array([1, 2]), np.array([4]))), axis=0) == pytest.approx(7 / 3)


def test_jax_arrays_stay_jax_arrays():
    found = two.reduce("MEAN", PerReplica((jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]))))
    assert isinstance(found, jax.Array)
    assert (found.tolist(), found.dtype) == ([2.0, 3.0], jnp.float32)
    half = two.reduce("MEAN", PerReplica((jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.bfloat16))))
    assert (half.dtype, half.tolist()) == (jnp.bfloat16, [0.5, 0.5])


def test_structures_of_per_replica_values():
    found = two.reduce("SUM", {"loss": PerReplica((1.0, 2.0)), "counts": [PerReplica((1, 1))]})
    assert found == {"loss": 3.0, "counts": [2]}


def test_values_that_are_not_per_replica():
    assert two.reduce("MEAN", 3.0) == 3.0
    assert two.reduce("SUM", 0) == 0
    with pytest.raises(ValueError, match="summed over 2 replicas"):
        two.reduce("SUM", 3.0)
    # With one replica run returns plain values.
    one = Replicas(1)
    assert one.reduce("SUM", np.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert one.reduce("MEAN", np.array([1.0, 2.0]), axis=0) == 1.5
    assert one.reduce("SUM", PerReplica((5,))) == 5


@pytest.mark.parametrize(
    ("operation", "value", "axis", "error", "text"),
    [
        ("MAX", PerReplica((1, 2)), None, ValueError, "reduce_op='MAX'.*SUM or ReduceOp.MEAN"),
        ("SUM", PerReplica((np.zeros(3), np.zeros(1))), None, ValueError, r"shapes \[\(3,\), \(1,\)\].*axis=0"),
        ("SUM", PerReplica((np.zeros((1, 2)), np.zeros((1, 3)))), 0, ValueError, "shapes"),
        ("SUM", PerReplica((1.0, 2.0)), 0, ValueError, "axis 0.*replica 0 with rank 0"),
        ("SUM", PerReplica((np.zeros(2), np.zeros(2))), 1, ValueError, "axis 1"),
        ("SUM", PerReplica((np.zeros(2), np.zeros(2))), 0.5, ValueError, "axis 0.5"),
        ("SUM", PerReplica(("a", "b")), None, TypeError, "Found <class 'str'> to be reduced"),
        ("SUM", PerReplica(({"a": 1}, {"b": 1})), None, ValueError, r"leaves \['b'\] on replica 1.*\['a'\]"),
        ("SUM", PerReplica((1, 2, 3)), None, ValueError, "Found 3 values of replicas"),
    ],
)
def test_what_cannot_be_reduced_is_named(operation, value, axis, error, text):
    with pytest.raises(error, match=text):
        two.reduce(operation, value, axis=axis)


def test_only_outside_of_functions_that_run():
    with in_replica(ReplicaContext(0, 2, None)), pytest.raises(RuntimeError, match="inside a function"):
        two.reduce("SUM", PerReplica((1, 2)))


def test_local_results():
    assert two.experimental_local_results(PerReplica((1, 2))) == (1, 2)
    assert two.experimental_local_results(5) == (5,)
    assert two.experimental_local_results({"a": PerReplica((1, 2)), "b": 3}) == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    assert two.local_results(PerReplica((1, 2))) == (1, 2)
