"""How the arrays of a step get from a host's memory to its devices and back.

`SeparateTransfers` takes each array by itself. One CPU device then computes on the shared memory in place. An
accelerator would pay for each array. So `PackedTransfers` sends one buffer to each device, which the compiled step
takes apart. It fetches one buffer from each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.kernels.cut import Pieces, cut_columns
from podembed.embedding.kernels.threads import Threads, cut
from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.measures.step_measures import NORMS_EVERY
from podembed.workers.device.options import DeviceOptions, Transfers
from podembed.workers.device.programs import Blocks, Inputs
from podembed.workers.device.shared_memory import ChannelEnd
from podembed.workers.device.transfers.pinned import LANES, Arriving, Staging, in_pinned, staging
from podembed.workers.device.transfers.side_by_side import Together
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import LARGEST_LEVELS, PaddingLevels, SequencePadding

# Arrays in a packed buffer begin at multiples of this. So they are whole tiles of a TPU, which moves nothing to take
# rows of `LANES` numbers apart. Its first words are the step and the scale of the gradients.
_ALIGNMENT = 8 * LANES


@dataclass(frozen=True, slots=True)
class HostArrays:
    """A batch in the memory of the host.

    Attributes:
      inputs: what goes to the devices.
      gradients: where those of activations go, by feature whose table is trained.
      scores: where those of an evaluation go.
      buffer: which batch of the memory it is.
      levels: how much room its sequences have.
    """

    inputs: Inputs
    gradients: tuple[np.ndarray, ...]
    scores: np.ndarray
    buffer: int = 0
    levels: PaddingLevels = LARGEST_LEVELS


class HostBatches:
    """The batches in the memory of the host. Mutated: what was made is kept, since the memory stays.

    Args:
      padding: sizes of the job's sequences on a device.
      num_parts: devices with samples of their own.
    """

    def __init__(self, job: JobConfig, padding: SequencePadding, *, num_parts: int) -> None:
        self._job, self._padding, self._num_parts = job, padding, num_parts
        self._are_trained = [feature.table.trainable for feature in job.host_features.values()]
        self._found: dict[tuple[int, PaddingLevels], HostArrays] = {}

    def of(self, end: ChannelEnd, buffer: int, levels: PaddingLevels) -> HostArrays:
        """A batch of these levels, without a copy."""
        if (buffer, levels) not in self._found:
            arrays = end.buffers[buffer]
            bags = end.layout.on_devices.bags_in(arrays, levels[len(LARGEST_LEVELS) :], num_devices=self._num_parts)
            inputs: Any = {name: arrays[name] for name in ("dense", "labels", "weights")}
            inputs |= {"lengths": end.layout.lengths_in(arrays), "columns": end.layout.columns_in(arrays)}
            inputs["activations"] = self._tensors(end, arrays["activations"], levels)
            inputs["rows"] = {name: self._used(name, ids.rows, levels) for name, ids in bags.items()}
            inputs["row_bags"] = {name: ids.bags for name, ids in bags.items() if ids.bags is not None}
            inputs["row_weights"] = {
                name: self._used(name, ids.weights, levels) for name, ids in bags.items() if ids.weights is not None
            }
            gradients = compress(self._tensors(end, arrays["gradients"], levels), self._are_trained)
            self._found[buffer, levels] = HostArrays(
                Inputs(**inputs), tuple(gradients), arrays["scores"], buffer, levels
            )
        return self._found[buffer, levels]

    def _tensors(self, end: ChannelEnd, memory: np.ndarray, levels: PaddingLevels) -> tuple[np.ndarray, ...]:
        """Tensors by feature, `[n, *inner, width]`; of a sequence the rows that the step has room for."""
        layout, sequences = end.layout.activations, self._padding.sequences
        return tuple(
            self._used(name, block, levels) if name in sequences else tensor
            for name, block, tensor in zip(
                self._job.host_features, layout.blocks(memory), layout.tensors(memory), strict=True
            )
        )

    def _used(self, name: str, block: np.ndarray, levels: PaddingLevels) -> np.ndarray:
        """The vectors that the step has room for, of a sequence; all, of any other feature."""
        padding = self._padding
        return block[: self._num_parts * padding.vectors(name, levels)] if name in padding.sequences else block


class Numbers(NamedTuple):
    """A step's numbers beside a batch: its own, and 1 / the weight of the global batch."""

    step: int
    scale: np.float32 = np.float32(0)


class TransferWay(Protocol):
    """A way of arrays. `unpacked` and `packed` are parts of the compiled programs, as one device sees them.

    Attributes:
      is_packed: whether all gradients leave a step as one array, and not each as its own.
    """

    is_packed: bool

    def send(self, arrays: HostArrays, numbers: Numbers) -> tuple[Any, ...]:
        """The arguments of a compiled step behind its state. Copies may still be under way. The host writes the memory
        again only after the step is answered, and what is answered was computed from these copies.
        """
        ...

    def shapes(self, inputs: Inputs) -> tuple[Any, ...]:
        """Shapes of what `send` returns, of inputs of these shapes over all hosts."""
        ...

    def unpacked(self, shapes: Inputs, arguments: tuple[Any, ...]) -> tuple[Inputs, jax.Array, jax.Array]:
        """Inside a step: inputs, step and scale."""
        ...

    def packed(self, gradients: Blocks) -> Any:
        """Inside a step: what the gradients leave it as."""
        ...

    def fetch(self, gradients: Any, arrays: HostArrays, scale: np.float32) -> list[Callable[[], None]]:
        """Begins to copy gradients to the host. Returns functions that wait for them and write them, times `scale`."""
        ...


def transfer_way(options: DeviceOptions, mesh: GangMesh, *, asks_for_step: bool, thread_pool: Threads) -> TransferWay:
    """The way that the settings name, or the best for these devices.

    Args:
      asks_for_step: whether programs compute with the number of the step.
      thread_pool: copies into buffers.
    """
    way = options.transfers
    if way is Transfers.AUTO:
        way = Transfers.SEPARATE if mesh.platform == "cpu" else Transfers.PACKED
    if way is Transfers.PACKED:
        return PackedTransfers(mesh, thread_pool)
    return SeparateTransfers(mesh, thread_pool, asks_for_step=asks_for_step)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SeparateGradients:
    """The gradients of a step. A JAX pytree.

    Attributes:
      apart: by position, each as its own array.
      wholes: `[n, columns]`, arrays whose columns are the other gradients.
      together: which ones.
    """

    apart: dict[int, jax.Array]
    wholes: Blocks = ()
    together: Together = field(default=(), metadata={"static": True})

    def within(self, wholes: Blocks, together: Together) -> SeparateGradients:
        """The same gradients, where these are columns of those arrays."""
        cut = {at for runs in together for run in runs for at in run.positions}
        return SeparateGradients({at: one for at, one in self.apart.items() if at not in cut}, wholes, together)


class _Cut(NamedTuple):
    """A copy to the host: of gradients that lie next to each other, from one device, these rows."""

    whole: int
    part: int
    rows: slice
    columns: slice
    pieces: Pieces


class SeparateTransfers:
    """Each array by itself, but for gradients that the step has side by side. Mutated: what is known of a step and of
    the memory.
    """

    is_packed = False

    def __init__(self, mesh: GangMesh, thread_pool: Threads, *, asks_for_step: bool) -> None:
        self._mesh, self._thread_pool, self._asks_for_step = mesh, thread_pool, asks_for_step
        # With the memory that they write to.
        self._cuts: dict[tuple[int, PaddingLevels], tuple[tuple[np.ndarray, ...], list[_Cut]]] = {}
        self._in_place: dict[tuple[int, PaddingLevels], Inputs] = {}
        self._steps: dict[int, jax.Array] = {}

    def send(self, arrays: HostArrays, numbers: Numbers) -> tuple[Any, ...]:
        return self._inputs(arrays), self._number(numbers.step), self._mesh.place(numbers.scale)

    def _inputs(self, arrays: HostArrays) -> Inputs:
        if not self._mesh.is_one_cpu:
            return jax.tree.map(self._split, arrays.inputs)
        # The arrays are the shared memory itself: built once, they show each batch in turn.
        key = arrays.buffer, arrays.levels
        if key not in self._in_place:
            self._in_place[key] = jax.tree.map(self._shared, arrays.inputs)
        return self._in_place[key]

    def _split(self, values: np.ndarray) -> jax.Array:
        return self._mesh.split(np.split(values, self._mesh.num_parts))

    def _shared(self, values: np.ndarray) -> jax.Array:
        shape = (len(values) * self._mesh.num_all_parts, *values.shape[1:])
        own = jax.dlpack.from_dlpack(values)
        return jax.make_array_from_single_device_arrays(shape, self._mesh.by_sample, [own])

    def _number(self, step: int) -> jax.Array:
        """The number of a step, on every device. Programs that do not ask for it get one of two numbers, which stay
        there: they only tell whether norms are measured.
        """
        if not self._asks_for_step:
            step = min(step % NORMS_EVERY, 1)
        if step not in self._steps:
            if self._asks_for_step:
                self._steps.clear()
            self._steps[step] = self._mesh.place(np.uint32(step))
        return self._steps[step]

    def shapes(self, inputs: Inputs) -> tuple[Any, ...]:
        return inputs, *(
            jax.ShapeDtypeStruct((), kind, sharding=self._mesh.replicated) for kind in ("uint32", "float32")
        )

    def unpacked(self, shapes: Inputs, arguments: tuple[Any, ...]) -> tuple[Inputs, jax.Array, jax.Array]:
        inputs, step, scale = arguments
        return inputs, step, scale

    def packed(self, gradients: Blocks) -> Any:
        return SeparateGradients(dict(enumerate(gradients)))

    def fetch(self, gradients: Any, arrays: HostArrays, scale: np.float32) -> list[Callable[[], None]]:
        # All copies are under way before the first is waited for.
        wholes = [own_parts(self._mesh, array) for array in gradients.wholes]
        apart = {at: own_parts(self._mesh, array) for at, array in gradients.apart.items()}
        calls = [
            partial(_cut_to_host, wholes[one.whole][one.part], one, scale)
            for one in self._cuts_of(arrays, gradients.together)
        ]
        return calls + [partial(to_host, parts, arrays.gradients[at], scale) for at, parts in apart.items()]

    def _cuts_of(self, arrays: HostArrays, together: Together) -> list[_Cut]:
        """The copies of gradients out of arrays, in parts for the threads."""
        key = arrays.buffer, arrays.levels
        blocks, found = self._cuts.get(key, (None, []))
        if blocks is not arrays.gradients:
            whole_copies = [
                _Cut(
                    whole,
                    part,
                    slice(0, pieces.num_rows // self._mesh.num_parts),
                    slice(run.first_column, run.first_column + pieces.num_columns),
                    pieces,
                )
                for whole, runs in enumerate(together)
                for run in runs
                for pieces in [Pieces.of([arrays.gradients[at] for at in run.positions])]
                for part in range(self._mesh.num_parts)
            ]
            rows = [one.rows.stop for one in whole_copies]
            sizes = [one.rows.stop * one.pieces.num_columns for one in whole_copies]
            found = [
                whole_copies[item]._replace(rows=slice(first, last))
                for item, first, last in cut(rows, sizes, self._thread_pool.num_threads)
            ]
            self._cuts[key] = arrays.gradients, found
        return found


class PackedTransfers:
    """One buffer of 4-byte words to each device, and one of float32 back. Mutated: the memory of the former.

    Each batch that may be in flight has memory of its own. It is written again only after its step was answered.
    """

    is_packed = True

    def __init__(self, mesh: GangMesh, thread_pool: Threads) -> None:
        self._mesh, self._thread_pool = mesh, thread_pool
        # By batch and size: levels of sequences that need as many words share the memory.
        self._staging: dict[tuple[int, int], Staging] = {}

    def send(self, arrays: HostArrays, numbers: Numbers) -> tuple[Any, ...]:
        num_parts, leaves = self._mesh.num_parts, jax.tree.leaves(arrays.inputs)
        sizes = [leaf.size // num_parts for leaf in leaves]
        num_words = _ALIGNMENT + sum(map(_aligned, sizes))
        key = arrays.buffer, num_words
        if key not in self._staging:
            self._staging[key] = staging(self._mesh, num_words)
        rows, calls = self._staging[key].rows, []
        # Devices that work on the same samples follow each other.
        for row, part in zip(rows, np.repeat(np.arange(num_parts), len(rows) // num_parts), strict=True):
            row[0], row[1] = numbers.step, numbers.scale.view(np.uint32)
            at = _ALIGNMENT
            for leaf, size in zip(leaves, sizes, strict=True):
                words = leaf.view(np.uint32).reshape(num_parts, size)[part]
                calls.append(partial(np.copyto, row[at : at + size], words))
                at += _aligned(size)
        self._thread_pool.run(calls, size=sum(map(len, rows)))
        return (self._staging[key].send(),)

    def shapes(self, inputs: Inputs) -> tuple[Any, ...]:
        parts = self._mesh.num_all_parts
        sizes = [math.prod(leaf.shape) // parts for leaf in jax.tree.leaves(inputs)]
        num_rows = (_ALIGNMENT + sum(map(_aligned, sizes))) // LANES
        return (jax.ShapeDtypeStruct((parts, num_rows, LANES), jnp.uint32, sharding=self._mesh.by_sample),)

    def unpacked(self, shapes: Inputs, arguments: tuple[Any, ...]) -> tuple[Inputs, jax.Array, jax.Array]:
        words = arguments[0][0]
        leaves, structure = jax.tree.flatten(shapes)
        found, at = [], _ALIGNMENT
        for leaf in leaves:
            rows, *inner = leaf.shape
            shape = (rows // self._mesh.num_all_parts, *inner)
            size = math.prod(shape)
            part = words[at // LANES : (at + _aligned(size)) // LANES]
            found.append(jax.lax.bitcast_convert_type(part, leaf.dtype).reshape(-1)[:size].reshape(shape))
            at += _aligned(size)
        scale = jax.lax.bitcast_convert_type(words[0, 1], jnp.float32)
        return jax.tree.unflatten(structure, found), words[0, 0], scale

    def packed(self, gradients: Blocks) -> Any:
        parts = [jnp.zeros((0, LANES))]
        for gradient in gradients:
            room = _aligned(gradient.size) - gradient.size
            parts.append(jnp.pad(gradient.reshape(-1), (0, room)).reshape(-1, LANES))
        return jnp.concatenate(parts)[None]

    def fetch(self, gradients: Any, arrays: HostArrays, scale: np.float32) -> list[Callable[[], None]]:
        parts, calls, at = [Arriving(in_pinned(part)) for part in own_shards(gradients)], [], 0
        for out in arrays.gradients:
            size = out.size // len(parts)
            calls.append(partial(_unpack, parts, slice(at, at + size), out, scale))
            at += _aligned(size)
        return calls


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def own_parts(mesh: GangMesh, array: jax.Array) -> list[jax.Array]:
    """This host's rows of a global array, one part after the other, with their copies to this process under way.

    On one CPU device there is nothing to copy.
    """
    parts = own_shards(array)
    if not mesh.is_one_cpu:
        for part in parts:
            part.copy_to_host_async()
    return parts


def own_shards(array: jax.Array) -> list[jax.Array]:
    """The same where they are, on the devices."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return [shard.data for shard in sorted(shards, key=lambda shard: shard.index[0].start or 0)]


def to_host(parts: Sequence[jax.Array], out: np.ndarray, scale: np.float32 | None = None) -> None:
    """Waits for the parts of `own_parts` and copies them, times `scale`."""
    at = 0
    for part in parts:
        rows = np.asarray(part)
        if scale is None:
            out[at : at + len(rows)] = rows
        else:
            np.multiply(rows, scale, out=out[at : at + len(rows)])
        at += len(rows)


def _cut_to_host(part: jax.Array, copy: _Cut, scale: np.float32) -> None:
    """Waits for an array of one device and copies gradients within it, some of their rows, to the features' blocks,
    times `scale`.
    """
    values = np.ascontiguousarray(part)
    first = copy.part * len(values) + copy.rows.start
    cut_columns(values[copy.rows, copy.columns], copy.pieces, scale, first=first)


def _unpack(parts: Sequence[Arriving], where: slice, out: np.ndarray, scale: np.float32) -> None:
    """Waits for packed gradients and copies those of one feature, times `scale`."""
    rows = np.split(out, len(parts))
    for part, own in zip(parts, rows, strict=True):
        np.multiply(part.values().reshape(-1)[where].reshape(own.shape), scale, out=own)
