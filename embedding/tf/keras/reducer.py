"""Sums gradients over the processes that train together.

One process holds one gradient per variable. This module owns the exchange between `jax.distributed` processes and the
protocol by which another exchange can take its place. Every process must call with the same variables in the same
order. Which gradients are missing must agree as well, since a collective only one side enters cannot finish.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podembed.embedding.tf.keras.row_slices import RowSlices

Gradient = jax.Array | RowSlices


class GradientReducer(Protocol):
    """Adds up what the processes hold."""

    def sum(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Returns the sum over processes of each gradient, in the order given; the same on all of them."""
        ...


class OneProcess:
    """Nothing to add: the gradients come back as they are."""

    def sum(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Returns the gradients."""
        return list(gradients)


class AllProcesses:
    """Sums over all processes of `jax.distributed` with JAX collectives, one for all dense gradients together.

    Row slices are gathered in the order of the processes, without merging rows.
    """

    def sum(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Returns the sums. Blocks until every process has called; JAX's own collective timeout ends the wait.

        Raises:
          ValueError: a gradient that spans processes already.
        """
        for one in gradients:
            _require_own(one.values if isinstance(one, RowSlices) else one)
        dense = iter(self._dense_sums([one for one in gradients if not isinstance(one, RowSlices)]))
        return [self._gathered(one) if isinstance(one, RowSlices) else next(dense) for one in gradients]

    def _dense_sums(self, gradients: list[jax.Array]) -> list[jax.Array]:
        if not gradients:
            return []
        gang = _gang(tuple(jax.devices()))
        # All of one dtype go as one array, so that their number costs no messages.
        stacked = [
            jax.make_array_from_single_device_arrays(
                (len(gang.devices), one.shape[1]), gang.one_each, [_placed(one, gang.devices[jax.process_index()])]
            )
            for one in _packed(gradients)
        ]
        totals = _sums(gang.everywhere)(stacked)
        return _unpacked([total.addressable_data(0) for total in totals], gradients)

    def _gathered(self, slices: RowSlices) -> RowSlices:
        """All processes' slices after each other. They differ in number, so they travel padded to the longest."""
        count = len(slices.indices)
        counts = np.asarray(multihost_utils.process_allgather(np.int32(count))).reshape(-1)
        padding = int(counts.max()) - count
        indices = np.pad(np.asarray(slices.indices), (0, padding))
        values = np.pad(np.asarray(slices.values), [(0, padding)] + [(0, 0)] * (slices.values.ndim - 1))
        all_indices, all_values = multihost_utils.process_allgather((indices, values))
        is_filled = np.arange(len(indices))[None, :] < counts[:, None]
        return RowSlices(np.asarray(all_indices)[is_filled], np.asarray(all_values)[is_filled], slices.dense_shape)


def _require_own(gradient: jax.Array) -> None:
    if not gradient.is_fully_addressable:
        raise ValueError(
            f"Found a gradient of shape {gradient.shape} that spans processes. Expected one this process holds alone, "
            "to be summed with "
            "the others'. Pass skip_gradients_aggregation=True: a program over all devices has summed it already."
        )


def default_gradient_reducer() -> GradientReducer:
    """`AllProcesses` where `jax.distributed` joined several processes, else `OneProcess`."""
    return AllProcesses() if jax.process_count() > 1 else OneProcess()


def _dtypes(gradients: Sequence[jax.Array]) -> list[Any]:
    return list(dict.fromkeys(one.dtype for one in gradients))


@jax.jit
def _packed(gradients: list[jax.Array]) -> list[jax.Array]:
    """For each dtype one array `[1, n]` of all its numbers."""
    return [
        jnp.concatenate([one.reshape(1, -1) for one in gradients if one.dtype == dtype], axis=1)
        for dtype in _dtypes(gradients)
    ]


@jax.jit
def _unpacked(totals: Sequence[jax.Array], like: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays that `_packed` made one of, in the order and with the shapes of `like`."""
    total_of = dict(zip(_dtypes(like), totals, strict=True))
    starts = dict.fromkeys(total_of, 0)
    found = []
    for one in like:
        first = starts[one.dtype]
        starts[one.dtype] += one.size
        found.append(total_of[one.dtype][first : first + one.size].reshape(one.shape))
    return found


@functools.cache
def _sums(everywhere: NamedSharding) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Sums over the first axis, on every process; compiled once for each shape."""
    return jax.jit(lambda stacked: [jnp.sum(one, axis=0) for one in stacked], out_shardings=everywhere)


class _Gang(NamedTuple):
    """The first device of each process, and arrays over them: with a row on each, or the same on all."""

    devices: tuple[Any, ...]
    one_each: NamedSharding
    everywhere: NamedSharding


@functools.cache
def _gang(devices: tuple[Any, ...]) -> _Gang:
    first: dict[int, Any] = {}
    for device in sorted(devices, key=lambda one: one.id):
        first.setdefault(device.process_index, device)
    chosen = tuple(first[index] for index in sorted(first))
    mesh = Mesh(np.array(chosen), ("process",))
    return _Gang(chosen, NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec()))


def _placed(array: jax.Array, device: Any) -> jax.Array:
    """An array on a device. To ask where it is costs less than to put it where it is."""
    return array if array.devices() == {device} else jax.device_put(array, device)
