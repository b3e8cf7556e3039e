"""`CrossReplica`: what a strategy does with values of all its replicas, without any of its processes.

The calls of `tf.distribute.Strategy` for the code outside of `run`, shared by `LocalStrategy` and `PodStrategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podembed.embedding.tf.features.structures import flatten
from podembed.embedding.tf.replicas.batch_shares import split_over
from podembed.embedding.tf.replicas.distributed_input import (
    DistributedDataset,
    DistributedDatasets,
    InputContext,
    datasets_from_function,
)
from podembed.embedding.tf.replicas.per_replica import PerReplica, local_value
from podembed.embedding.tf.replicas.reduction import Axis, ReduceOp, reduce_values
from podembed.embedding.tf.replicas.replica_context import get_replica_context


def check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Refuses what `run` of a strategy cannot call or pass on.

    Raises:
      TypeError: `fn` is no function, `args` no list or tuple, or `kwargs` no dict of names.
    """
    if not callable(fn):
        raise TypeError(
            f"Found {fn!r:.80} as fn of strategy.run. Expected a function that each replica calls. Pass the function "
            "itself, and its arguments as args=(...)."
        )
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(
            f"Found a {type(args).__name__} as args of strategy.run. Expected a tuple or a list of the arguments. "
            "Write args=(value,) for a single one."
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise TypeError(
            f"Found {kwargs!r:.80} as kwargs of strategy.run. Expected a dict of arguments by name. Write "
            "kwargs={'name': value}."
        )


class CrossReplica:
    """Calls on the driver about values of all replicas. Holds nothing; the strategy says how many there are."""

    @property
    def num_replicas_in_sync(self) -> int:
        raise NotImplementedError

    def split(self, batch: Any, *, num_samples: int | None = None) -> Any:
        """A batch as `PerReplica` arguments for `run` or `enqueue`, cut as `enqueue` cuts features.

        `batch_shares.split_over` says what it takes.
        """
        return split_over(batch, self.num_replicas_in_sync, num_samples=num_samples)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis = None) -> Any:
        """One value of those of the replicas: `strategy.reduce("MEAN", strategy.run(step), axis=None)`.

        `reduction.reduce_values` has the rules.

        Raises:
          RuntimeError: called inside a function that the strategy runs.
          TypeError, ValueError: the values do not fit.
        """
        if get_replica_context() is not None:
            raise RuntimeError(
                "reduce was called inside a function that the strategy runs. Expected a call outside, where the values "
                "of all replicas are. Inside, pass gradients to podembed.embedding.default_gradient_reducer().sum."
            )
        return reduce_values(reduce_op, value, axis=axis, num_replicas=self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of all replicas: those of a `PerReplica`, or of a structure with such ones one for each replica.

        Anything else is the only value.
        """
        if isinstance(value, PerReplica):
            return value.values
        if any(isinstance(leaf, PerReplica) for leaf in flatten(value)):
            return tuple(local_value(value, replica) for replica in range(self.num_replicas_in_sync))
        return (value,)

    local_results = experimental_local_results

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> DistributedDataset:
        """An iterable of batches of all replicas, as one whose batches are cut for them.

        The last batch may be smaller, and no batch must divide by the replicas. The first ones get a sample more, and a
        replica for which there is none gets arrays of length 0. A `TPUEmbedding` refuses batches of another size than
        it was built for, so leave the last one out or pad it where one takes part.

        Args:
          dataset: any iterable of arrays in any nesting, see `split`; a generator can be read once.
          options: accepted and without effect: batches stay in the memory of the driver until `run` or `enqueue` takes
            them.

        Raises:
          TypeError: it is no iterable.
        """
        del options
        return DistributedDataset(dataset, num_replicas=self.num_replicas_in_sync)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> DistributedDatasets:
        """The datasets that `dataset_fn(input_context)` returns for each host, put together. Their batches are those of
        one replica.

        The function is called here, on the driver, once for each host, which is one replica. Iterating ends with the
        longest of the datasets; replicas whose own has ended get arrays of length 0.

        Args:
          options: accepted and without effect.

        Raises:
          TypeError: it returns something that is no iterable.
        """
        del options
        return datasets_from_function(dataset_fn, num_replicas=self.num_replicas_in_sync)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function
