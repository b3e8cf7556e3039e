"""`StepValues`: between the structures that a user passes to a `TPUEmbedding` and the flat shares that an engine works
on.

One direction: features and weights → checked bags of ids, cut into a share for each host. The other: activations of the
shares → one JAX array per feature, and gradients → float32 matrices, cut as the activations came. Shapes here are as
seen by the caller: of the whole batch on the driver, of one share inside a function that a strategy runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from podembed.embedding.features.id_policies import fit_ids, shown_path
from podembed.embedding.optimizers import FTRL, AdagradMomentum, Adam, Lion, Momentum
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.engine.engine import Share
from podembed.embedding.tf.features.bags import bags_of, share_ends, split_bags
from podembed.embedding.tf.features.inputs import FeatureInput, host_array, read_input, refuse_traced, with_weight
from podembed.embedding.tf.features.shapes import (
    Shape,
    is_sequence,
    keeps_positions,
    num_vectors,
    shape_of_input,
    share_of,
)
from podembed.embedding.tf.features.structures import flatten, flatten_with_paths, pack_like, require_same_structure
from podembed.embedding.tf.replicas.per_replica import PerReplica
from podembed.embedding.tf.tpu_embedding.declared import DeclaredTables

_EFFECTS_OF_ZEROS = {
    Adam: "Adam still decays its slots and moves the rows of the batch by their momentum",
    AdagradMomentum: "AdagradMomentum still decays its momentum and moves the rows of the batch by it",
    Momentum: "Momentum still decays its momentum and moves the rows of the batch by it",
    Lion: "Lion still decays its momentum and moves the rows of the batch by its sign",
    FTRL: "FTRL still recomputes the rows of the batch from their linear slot, which sets rows seen for the first time "
    "to 0",
}

_SEVERAL, _SMALL_BYTES = 4, 128 << 10

Inputs = Sequence[Sequence[FeatureInput]]
"""Per feature its parts: one, or one for each replica where the value was taken apart already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """The translation for one feature configuration.

    Attributes:
      num_parts: values that a `PerReplica` has here; 1 inside a function that a strategy runs.
    """

    declared: DeclaredTables
    num_parts: int

    def read(self, features: Any) -> Inputs:
        """Reads the ids of all features.

        Raises:
          TypeError, ValueError: another structure, or values that are not accepted, see `embedding.tf.features.inputs`.
        """
        require_same_structure(self.declared.structure, features, "features")
        parts = zip(self.declared.paths, flatten(features), self.declared.features, strict=True)
        return [self._parts(path, leaf, feature.table.dynamic_keys is not None) for path, leaf, feature in parts]

    def _parts(self, path: str, value: Any, keys_of_any: bool) -> list[FeatureInput]:
        if not isinstance(value, PerReplica):
            return [read_input(path, value, keys_of_any=keys_of_any)]
        if len(value.values) != self.num_parts:
            raise ValueError(
                f"Found {len(value.values)} values of replicas in input {shown_path(path)}. Expected {self.num_parts}. "
                "Pass a whole batch or one value for each replica on the driver, and the replica's own value inside "
                "strategy.run."
            )
        return [read_input(path, one, keys_of_any=keys_of_any) for one in value.values]

    def incoming_shapes(self, inputs: Inputs) -> list[Shape]:
        """The output shapes that inputs ask for, parts together.

        Raises:
          ValueError: a rank or an axis that is not accepted.
        """
        shapes: list[Shape] = []
        for parts, feature in zip(inputs, self.declared.features, strict=True):
            of_parts = [shape_of_input(part, feature) for part in parts]
            shapes.append((sum(shape[0] or 0 for shape in of_parts), *of_parts[0][1:]))
        return shapes

    def ignored_lengths(self, inputs: Inputs) -> dict[str, str]:
        """By path, a warning for each feature whose `max_sequence_length` has no meaning for its input."""
        found = {}
        for path, parts, feature in zip(self.declared.paths, inputs, self.declared.features, strict=True):
            rank = max(len(part.shape) for part in parts)
            if is_sequence(feature) and rank > 2:
                found[path] = (
                    f"Input {shown_path(path)} is of rank {rank}, which is above 2: "
                    f"max_sequence_length={feature.max_sequence_length} is ignored, "
                    "and all ids of a row are combined. Leave it out, or pass rank 2 for a sequence."
                )
        return found

    def weigh(self, inputs: Inputs, weights: Any) -> Inputs:
        """The inputs with weights.

        Raises:
          TypeError, ValueError: another structure, or weights that do not fit their ids.
        """
        if weights is None:
            return inputs
        require_same_structure(self.declared.structure, weights, "weights")
        return [_weighted(parts, weight) for parts, weight in zip(inputs, flatten(weights), strict=True)]

    def shares(
        self, inputs: Inputs, shapes: Sequence[Shape], *, num_shares: int, is_training: bool, name: str | None
    ) -> list[Share]:
        """One share of the batch for each host.

        Args:
          shapes: shapes of the activations, known on every axis.

        Raises:
          ValueError: an id outside the vocabulary, or rows that do not fit the shape.
        """
        per_share: list[list[Ragged]] = [[] for _ in range(num_shares)]
        altered = [0] * len(self.declared.tables)
        for at, (parts, shape) in enumerate(zip(inputs, shapes, strict=True)):
            bags, count = self._bags(at, parts, share_of(shape, len(parts)))
            altered[self.declared.table_numbers[at]] += count
            # A first batch without samples leaves the axis open.
            first_axis = int(shape[0] or 0) or bags[0].num_samples // max(1, num_vectors(shape[1:]))
            cut = bags if len(bags) == num_shares else split_bags(bags[0], first_axis, num_shares)
            for share, own in zip(per_share, cut, strict=True):
                share.append(own)
        # What was altered is counted once, with the first share.
        counts = [tuple(altered)] + [(0,) * len(altered)] * (num_shares - 1)
        return [
            Share(features=tuple(own), is_training=is_training, name=name, altered_ids=count)
            for own, count in zip(per_share, counts, strict=True)
        ]

    def _bags(self, at: int, parts: Sequence[FeatureInput], shape: Shape) -> tuple[list[Ragged], int]:
        feature = self.declared.features[at]
        found, altered = [], 0
        for part in parts:
            own = shape_of_input(part, feature)
            # Rows of lower rank become sequences that fill the declared shape.
            first = own[0] if len(own) == len(shape) else shape[0]
            num_bags = num_vectors((first, *shape[1:]))
            bags = bags_of(part, num_bags=num_bags, is_sequence=keeps_positions(part, feature))
            fitted, count = fit_ids(part.path, bags, feature.table)
            found.append(fitted)
            altered += count
        return found, altered

    def activations(self, shares: Sequence[Sequence[np.ndarray]], shapes: Sequence[Shape]) -> Any:
        """JAX arrays `[*shape, dim]`, structured like the configuration.

        Args:
          shares: per share and feature `[num_bags, dim]`. How many there are decides the first axis: a replica of an
            uneven batch may hold one sample more than the others.
        """
        arrays = []
        for at, shape in enumerate(shapes):
            parts = [share[at] for share in shares]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            arrays.append(whole if len(shape) == 1 else whole.reshape(-1, *_known(shape[1:]), whole.shape[1]))
        return pack_like(self.declared.structure, all_to_jax(arrays))

    def gradients(
        self, gradients: Any, shapes: Sequence[Shape], sizes: Sequence[Sequence[int]], *, num_shares: int
    ) -> list[list[np.ndarray]]:
        """Per share and feature float32 `[num_bags, dim]`, zeros for None.

        Args:
          shapes: shapes of the activations.
          sizes: as of `Engine.sizes_to_update`.

        Raises:
          TypeError: another type of sequence, or gradients that are not float32.
          ValueError: another structure, something else than a JAX array, or another shape.
        """
        require_same_structure(self.declared.structure, gradients, "gradients")
        # No batch waits for any: the engine says so once the gradients are checked by what is declared.
        sizes = sizes if all(sizes) else ()
        per_share: list[list[np.ndarray]] = [[] for _ in range(num_shares)]
        for at, (path, gradient) in enumerate(flatten_with_paths(gradients)):
            expected = (*_known(shapes[at]), self.declared.features[at].table.dim)
            if sizes:
                expected = (sum(share[at] for share in sizes) // max(1, num_vectors(expected[1:-1])), *expected[1:])
            array = self._checked(at, path, gradient, expected)
            ends = [0, len(array)] if num_shares == 1 else _ends(array, at, expected[0], sizes, num_shares)
            for share, own in enumerate(per_share):
                own.append(array if num_shares == 1 else array[ends[share] : ends[share + 1]])
        return per_share

    def missing_gradients(self, gradients: Any) -> dict[str, str]:
        """By path, a warning for each feature whose gradient is None."""
        missing = [at for at, gradient in enumerate(flatten(gradients)) if gradient is None]
        return {self.declared.paths[at]: self._effect_of_zeros(at) for at in missing}

    def _effect_of_zeros(self, at: int) -> str:
        optimizer = self.declared.features[at].table.optimizer
        effect = next((text for kind, text in _EFFECTS_OF_ZEROS.items() if isinstance(optimizer, kind)), None)
        return (
            f"No gradient passed for feature {shown_path(self.declared.paths[at])}, sending zero gradient. "
            f"{effect or 'Rows stay as they are, weight decay and limits aside'}."
        )

    def _checked(self, at: int, path: str, gradient: Any, expected: tuple[int, ...]) -> Any:
        if gradient is None:
            return np.zeros((num_vectors(expected[:-1]), expected[-1]), np.float32)
        if not isinstance(gradient, jax.Array):
            raise ValueError(
                f"found non-tensor type: {type(gradient)} at path {shown_path(path)}. Expected a JAX array or None. "
                "Pass jnp.asarray(gradient)."
            )
        if gradient.shape != expected:
            raise ValueError(
                f"Found gradient of shape {gradient.shape} at path {shown_path(path)}. Expected shape {expected}, that "
                "of its activation. Differentiate by the activations that dequeue returned."
            )
        if gradient.dtype != np.float32:
            raise TypeError(
                f"Found gradient of dtype {gradient.dtype} at path {shown_path(path)}. Expected float32. Pass "
                "gradient.astype(jnp.float32)."
            )
        if self.declared.features[at].table.is_sharded:
            refuse_traced(path, gradient)
            # It goes to the devices, where it most likely is.
            return gradient.reshape(-1, expected[-1]) if gradient.ndim > 2 else gradient
        return host_array(path, gradient).reshape(-1, expected[-1])


def all_to_jax(arrays: Sequence[Any]) -> list[jax.Array]:
    """As `to_jax`, for all features. Several small arrays go through one program: to hand one over by itself costs more
    than its copy. The copies are the caller's own.
    """
    if any(isinstance(array, jax.Array) for array in arrays):
        # Of an engine with tables on devices: all of them lie there.
        return list(arrays)
    if len(arrays) < _SEVERAL or sum(array.nbytes for array in arrays) > _SMALL_BYTES * len(arrays):
        return [to_jax(array) for array in arrays]
    return _copied(list(arrays))


@jax.jit
def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


def to_jax(array: np.ndarray) -> jax.Array:
    """A JAX array on the default device; on the CPU it takes the memory over, which no one else may write to then."""
    if jax.default_backend() == "cpu" and array.flags.writeable and array.flags.c_contiguous:
        return jax.dlpack.from_dlpack(array)
    return jax.numpy.asarray(array)


def _ends(array: np.ndarray, at: int, first_axis: int, sizes: Sequence[Sequence[int]], num_shares: int) -> list[int]:
    """Where the part of each share begins and the last one ends."""
    own = [share[at] for share in sizes]
    return [0, *np.cumsum(own).tolist()] if own else share_ends(len(array), first_axis, num_shares)


def _weighted(parts: Sequence[FeatureInput], weight: Any) -> list[FeatureInput]:
    if weight is None:
        return list(parts)
    weights = weight.values if isinstance(weight, PerReplica) else (weight,)
    if len(weights) != len(parts):
        raise ValueError(
            f"Found a weight of {len(weights)} parts for input {shown_path(parts[0].path)} of {len(parts)}. Expected "
            "both whole or both PerReplica. Take both apart."
        )
    return [with_weight(part, one) for part, one in zip(parts, weights, strict=True)]


def _known(shape: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(int(axis or 0) for axis in shape)
