"""Iterables of batches for replicas, by the rules of `tf.distribute`."""

import numpy as np
import pytest

from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.features.inputs import Sparse
from podembed.embedding.tf.replicas.distributed_input import DistributedDataset, InputContext, datasets_from_function
from podembed.embedding.tf.replicas.per_replica import PerReplica
from podembed.embedding.tf.replicas.strategies import LocalStrategy


def batches(num_samples, batch_size):
    return [np.arange(start, min(start + batch_size, num_samples)) for start in range(0, num_samples, batch_size)]


def plain(value):
    return [part.tolist() for part in value.values]


def test_batches_of_all_replicas_are_cut_and_the_last_one_may_be_smaller():
    # TensorFlow's example: ten elements in batches of four over two replicas.
    dataset = DistributedDataset(batches(10, 4), num_replicas=2)
    expected = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    assert [plain(batch) for batch in dataset] == expected
    # A second epoch begins again.
    assert [plain(batch) for batch in dataset] == expected
    # What does not divide: a sample more for the first, and none at all for the last.
    assert [plain(batch) for batch in DistributedDataset(batches(6, 5), num_replicas=2)] == [
        [[0, 1, 2], [3, 4]],
        [[5], []],
    ]


def test_structures_stay_and_one_replica_gets_plain_values():
    batch = ({"x": Ragged.of_lists([[1], [2, 3]]), "w": None}, np.array([0.0, 1.0]))
    ((features, labels),) = DistributedDataset([batch], num_replicas=2)
    assert [part.to_lists() for part in features["x"].values] == [[[1]], [[2, 3]]]
    assert features["w"] is None
    assert plain(labels) == [[0.0], [1.0]]
    ((features, labels),) = LocalStrategy().experimental_distribute_dataset([batch])
    assert features["x"].to_lists() == [[1], [2, 3]]
    assert isinstance(labels, np.ndarray)


def test_iterators_are_read_as_they_come_and_never_silently_empty():
    read = []

    def generate():
        for at in range(3):
            read.append(at)
            yield np.array([at, at])

    dataset = DistributedDataset(generate(), num_replicas=2)
    iterator = iter(dataset)
    assert plain(next(iterator)) == [[0], [0]]
    assert read == [0]
    # A loop that was left may go on.
    assert [plain(batch) for batch in dataset] == [[[1], [1]], [[2], [2]]]
    with pytest.raises(RuntimeError, match="an iterator that has ended"):
        iter(dataset)
    with pytest.raises(TypeError, match="Found <class 'int'> as a dataset"):
        DistributedDataset(3, num_replicas=2)
    with pytest.raises(ValueError, match="Found <class 'int'>"):
        next(iter(DistributedDataset([3], num_replicas=2)))


def test_the_function_is_called_for_each_host_with_its_place():
    seen = []

    def dataset_fn(context):
        seen.append(context)
        size = context.get_per_replica_batch_size(4)
        start = context.input_pipeline_id * 10
        return [np.arange(start + at, start + at + size) for at in (0, size)]

    dataset = datasets_from_function(dataset_fn, num_replicas=2)
    assert seen == [
        InputContext(num_input_pipelines=2, input_pipeline_id=at, num_replicas_in_sync=2) for at in range(2)
    ]
    expected = [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    assert [plain(batch) for batch in dataset] == expected
    assert [plain(batch) for batch in dataset] == expected
    assert len(seen) == 2


def test_a_batch_size_that_does_not_divide():
    context = InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=3)
    assert context.get_per_replica_batch_size(6) == 2
    with pytest.raises(ValueError, match="7, which is not divisible by num_replicas_in_sync 3"):
        context.get_per_replica_batch_size(7)


def test_replicas_that_end_first_get_batches_without_samples():
    def batch(*rows):
        sparse = Sparse([[at, 0] for at in range(len(rows))], list(rows), (len(rows), 2))
        return {"x": np.array(rows), "r": Ragged.of_lists([[row] for row in rows]), "s": sparse, "w": None}

    lengths = [3, 1, 0]
    dataset = datasets_from_function(
        lambda context: [batch(at, at + 1) for at in range(lengths[context.input_pipeline_id])], num_replicas=3
    )
    found = list(dataset)
    assert [plain(one["x"]) for one in found] == [[[0, 1], [0, 1], []], [[1, 2], [], []], [[2, 3], [], []]]
    last = found[-1]
    assert [part.to_lists() for part in last["r"].values] == [[[2], [3]], [], []]
    assert [tuple(part.dense_shape) for part in last["s"].values] == [(2, 2), (0, 2), (0, 2)]
    assert last["w"] is None


def test_what_does_not_fit_together_is_named():
    uneven = datasets_from_function(lambda context: [3] * (1 + context.input_pipeline_id), num_replicas=2)
    iterator = iter(uneven)
    assert next(iterator) == PerReplica((3, 3))
    with pytest.raises(ValueError, match="dataset of replica 0 has ended before"):
        next(iterator)
    other = datasets_from_function(
        lambda context: [{"x": 1}] if context.input_pipeline_id else [{"y": 1}], num_replicas=2
    )
    with pytest.raises(ValueError, match=r"batches of the datasets with leaves \['x'\] on replica 1.*\['y'\]"):
        next(iter(other))
    with pytest.raises(TypeError, match="as the dataset of replica 0"):
        datasets_from_function(lambda context: None, num_replicas=2)
    with pytest.raises(TypeError, match="as dataset_fn. Expected a function .* experimental_distribute_dataset"):
        datasets_from_function([1], num_replicas=2)  # type: ignore[arg-type]
