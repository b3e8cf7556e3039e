"""Batches for the replicas of a strategy from Python iterables, as `tf.distribute` makes them from datasets.

`DistributedDataset` cuts batches of all replicas; `DistributedDatasets` puts those together that come for each replica
by itself. Both run on the driver, element by element on request. Nothing is read ahead, and values are cut
but never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from podembed.embedding.tf.features.structures import flatten_with_paths, leaves_of_replicas, pack_like
from podembed.embedding.tf.replicas.batch_shares import rows_of, split_over
from podembed.embedding.tf.replicas.per_replica import PerReplica, local_value

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputContext:
    """What a function that makes a dataset knows of its place, as `tf.distribute.InputContext`.

    Attributes:
      num_input_pipelines: how many datasets there are, one for each host.
      input_pipeline_id: number of this one, from 0.
      num_replicas_in_sync: replicas over all hosts.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Samples of one replica in a batch of `global_batch_size`.

        Raises:
          ValueError: it does not divide by the replicas.
        """
        each, left = divmod(global_batch_size, self.num_replicas_in_sync)
        if left:
            raise ValueError(
                f"Found global_batch_size {global_batch_size}, which is not divisible by num_replicas_in_sync "
                f"{self.num_replicas_in_sync}. Expected a multiple of it."
            )
        return each


class _Repeated:
    """An iterable that says so when it cannot begin again, where a generator would silently give nothing."""

    def __init__(self, dataset: Any, what: str) -> None:
        """Raises:
        TypeError: it is no iterable.
        """
        if not isinstance(dataset, Iterable):
            raise TypeError(
                f"Found {type(dataset)} as {what}. Expected an iterable of batches, such as a list or a generator."
            )
        self._dataset, self._what = dataset, what
        self._is_used_up = False

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._dataset)
        if self._is_used_up and iterator is self._dataset:
            raise RuntimeError(
                f"Found {self._what} to be read once more, which is an iterator that has ended. Expected one that can "
                "begin again. Pass a list or "
                "an object whose __iter__ makes a new iterator, or distribute a new one for each epoch."
            )
        return self._elements(iterator)

    def _elements(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        self._is_used_up = True


class DistributedDataset:
    """Batches of all replicas, cut into a part for each. Every `iter` begins the dataset again."""

    def __init__(self, dataset: Any, *, num_replicas: int) -> None:
        """Raises:
        TypeError: `dataset` is no iterable.
        """
        self._source = _Repeated(dataset, "a dataset")
        self._num_replicas = num_replicas

    def __iter__(self) -> Iterator[Any]:
        """Batches with `PerReplica` leaves, as `strategy.split` cuts them; with one replica as they came.

        A last batch with fewer samples is cut like any other, so a replica may get a part without samples.
        """
        source = iter(self._source)
        return (self._shown(split_over(batch, self._num_replicas)) for batch in source)

    def _shown(self, batch: Any) -> Any:
        return local_value(batch, 0) if self._num_replicas == 1 else batch


class DistributedDatasets:
    """A dataset for each replica, put together batch by batch. Every `iter` begins them again.

    Args:
      datasets: one for each replica, in their order.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        """Raises:
        TypeError: one of them is no iterable.
        """
        self._sources = [_Repeated(one, f"the dataset of replica {at}") for at, one in enumerate(datasets)]

    def __iter__(self) -> Iterator[Any]:
        """Batches with `PerReplica` leaves, until the last dataset has ended; with one replica as they came.

        A replica whose dataset ended before those of others gets batches without samples.

        Raises:
          ValueError: replicas have batches of different structure, or one that ended would need a value without samples
            that is a number.
        """
        return _together([iter(source) for source in self._sources])


def datasets_from_function(dataset_fn: Callable[[InputContext], Any], *, num_replicas: int) -> DistributedDatasets:
    """Calls the function once for each replica.

    Raises:
      TypeError: it is no function, or returns something that is no iterable.
    """
    if not callable(dataset_fn):
        raise TypeError(
            f"Found {type(dataset_fn)} as dataset_fn. Expected a function that takes an InputContext and returns an "
            "iterable of batches. Pass a dataset itself to experimental_distribute_dataset."
        )
    contexts = [
        InputContext(num_input_pipelines=num_replicas, input_pipeline_id=at, num_replicas_in_sync=num_replicas)
        for at in range(num_replicas)
    ]
    return DistributedDatasets([dataset_fn(context) for context in contexts])


def _together(iterators: Sequence[Iterator[Any]]) -> Iterator[Any]:
    while True:
        batches = [next(iterator, _END) for iterator in iterators]
        present = next((batch for batch in batches if batch is not _END), _END)
        if present is _END:
            return
        if len(batches) == 1:
            yield present
            continue
        filled = [_without_samples(present, at) if batch is _END else batch for at, batch in enumerate(batches)]
        yield _per_replica(filled)


def _without_samples(batch: Any, replica: int) -> Any:
    """A batch of the same structure without rows."""
    leaves = []
    for path, leaf in flatten_with_paths(batch):
        try:
            leaves.append(None if leaf is None else rows_of(path, leaf, 0, 0))
        except ValueError as error:
            raise ValueError(
                f"The dataset of replica {replica} has ended before those of others, and {type(leaf)} at '{path}' has "
                "no form without samples. Expected datasets of one length, or arrays alone. Let all end together."
            ) from error
    return pack_like(batch, leaves)


def _per_replica(batches: Sequence[Any]) -> Any:
    columns = [column for _, column in leaves_of_replicas(batches, what="batches of the datasets")]
    return pack_like(
        batches[0], [None if all(one is None for one in column) else PerReplica(column) for column in columns]
    )
