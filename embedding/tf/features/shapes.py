"""Shapes of activations: declared with the feature, given to `build`, or found from the input, in this order of
priority.

A shape here is that of a feature's activations without the last axis, the table's width. An empty one is unknown as a
whole; None and 0 on an axis leave that axis open when shapes are compared. The rules are those of TensorFlow 2.21's
`TPUEmbedding`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podembed.embedding.config import FeatureConfig
from podembed.embedding.features.id_policies import shown_path
from podembed.embedding.tf.features.inputs import FeatureInput
from podembed.embedding.tf.features.structures import sorted_keys

Shape = tuple[int | None, ...]


def times(shape: Shape, replicas: int) -> Shape:
    """Per replica → over all replicas; unknown stays unknown."""
    return (None if shape[0] is None else shape[0] * replicas, *shape[1:]) if shape else ()


def share_of(shape: Shape, replicas: int, *, replica: int | None = None) -> Shape:
    """Over all replicas → per replica, rounded down as in TensorFlow; the very share of a `replica` may be one longer,
    see `bags.share_ends`.
    """
    if not shape or shape[0] is None:
        return shape
    each, longer = divmod(shape[0], replicas)
    return (each + (replica is not None and replica < longer), *shape[1:])


def num_vectors(shape: Sequence[int | None]) -> int:
    """Vectors in activations of this shape; unknown axes count as 0."""
    return math.prod(int(axis or 0) for axis in shape)


def is_sequence(feature: FeatureConfig) -> bool:
    """Whether rank-2 inputs of this feature keep their positions apart."""
    return feature.is_sequence


def keeps_positions(feature_input: FeatureInput, feature: FeatureConfig) -> bool:
    """Whether the ids of a row stay apart. Above rank 2 a row is a bag of its own, and `max_sequence_length` has no
    meaning.
    """
    return is_sequence(feature) and len(feature_input.shape) <= 2


def shape_of_input(feature_input: FeatureInput, feature: FeatureConfig) -> Shape:
    """The output shape that an input asks for.

    Raises:
      ValueError: a dense input of rank 0 or with a last axis other than 1, or a sparse one below rank 2.
    """
    shape, path = feature_input.shape, shown_path(feature_input.path)
    if feature_input.kind == "dense":
        if len(shape) < 1:
            raise ValueError(
                f"Only rank 1 and above dense tensor is supported, found rank 0 for input {path}. Pass one id for each "
                "sample."
            )
        if len(shape) > 1 and shape[-1] != 1:
            raise ValueError(
                "Rank 2 or above dense tensor should have last dimension as 1, since that dimension is reduced. Found "
                f"shape {shape} for input "
                f"{path}. Add an axis with array[..., None] to look up each id, or pass Ragged to combine rows."
            )
        return shape if len(shape) == 1 else shape[:-1]
    if len(shape) < 2:
        raise ValueError(
            f"Only rank 2 and above sparse tensor is supported, found rank {len(shape)} for input {path}. Add the axis "
            "that counts samples."
        )
    if keeps_positions(feature_input, feature):
        return (shape[0], feature.max_sequence_length)
    return shape[:-1]


def shapes_of_build(feature_config: Any, features: Sequence[FeatureConfig], given: Any) -> list[Shape]:
    """The output shapes of the input shapes that were given to `build`.

    As in TensorFlow shapes are compared with the features by their number, so a list may stand for a tuple, and a flat
    list for any nesting. Keys of dicts are compared, too: a misspelt one would give its feature the shape of another.

    Args:
      given: the batch size as an int, or input shapes in the structure of `feature_config`, or a flat list of them.

    Raises:
      ValueError: another number of shapes, other keys, a shape of unknown or zero rank, or a negative size.
    """
    if isinstance(given, int | np.integer):
        return shapes_of_batch(features, int(given))
    return [
        _shape_of_input_shape(shape, feature)
        for shape, feature in zip(_input_shapes(feature_config, given), features, strict=True)
    ]


def shapes_of_batch(features: Sequence[FeatureConfig], batch_size: int) -> list[Shape]:
    """The output shapes of features that have one sample per element of the batch. A declared shape whose first axis is
    open begins with the batch, as in a job.

    Raises:
      ValueError: it is negative.
    """
    if batch_size < 0:
        raise ValueError(f"Found batch size {batch_size}. Expected at least 1. Pass the samples of one replica.")
    return [_shape_of_batch(feature, batch_size) for feature in features]


def _shape_of_batch(feature: FeatureConfig, batch_size: int) -> Shape:
    if feature.output_shape and feature.output_shape[0] is None:
        return (batch_size, *feature.output_shape[1:])
    return (batch_size, feature.max_sequence_length) if is_sequence(feature) else (batch_size,)


def _input_shapes(feature_config: Any, given: Any) -> list[Any]:
    expected, found = _named_leaves(feature_config), _named_leaves(given)
    names, found_names = [name for name, _ in expected], [name for name, _ in found]
    if len(found) != len(expected):
        raise ValueError(
            f"The structure of per_replica_input_shapes differs: found {len(found)} "
            f"shape{'s' if len(found) != 1 else ''}. Expected {len(expected)}, one for each feature: "
            f"{', '.join(map(shown_path, names))}. Pass as many, or a batch size."
        )
    if found_names != names and _has_keys(given):
        unknown, missing = sorted(set(found_names) - set(names)), sorted(set(names) - set(found_names))
        raise ValueError(
            f"The structure of per_replica_input_shapes differs: found unknown names {unknown} and missing names "
            f"{missing}. Expected {names}, as in feature_config. Pass exactly these."
        )
    return [shape for _, shape in found]


def _named_leaves(structure: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """Path and value of all that is neither a dict nor a sequence other than a shape; sequences have positions, of
    whatever type.
    """
    if isinstance(structure, Mapping):
        children = [(str(key), structure[key]) for key in sorted_keys(structure)]
    elif isinstance(structure, list | tuple) and not _is_shape(structure):
        children = [(str(at), child) for at, child in enumerate(structure)]
    else:
        return [("/".join(path), structure)]
    return [leaf for key, child in children for leaf in _named_leaves(child, (*path, key))]


def _has_keys(structure: Any) -> bool:
    if isinstance(structure, list | tuple):
        return any(map(_has_keys, structure))
    return isinstance(structure, Mapping)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(axis is None or isinstance(axis, int | np.integer) for axis in value)


def _shape_of_input_shape(shape: Any, feature: FeatureConfig) -> Shape:
    if not _is_shape(shape) or len(shape) < 1:
        raise ValueError(
            f"Received input tensor of shape {shape}. Rank must be 1 and above. Pass a tuple such as (batch_size,) or "
            "(batch_size, None)."
        )
    axes = tuple(None if axis is None else int(axis) for axis in shape)
    if any(axis is not None and axis < 0 for axis in axes):
        raise ValueError(f"Found input shape {axes}. Expected sizes of at least 0. Pass None for an unknown one.")
    if len(axes) == 2 and axes[-1] != 1 and is_sequence(feature):
        return (axes[0], feature.max_sequence_length)
    return axes if len(axes) == 1 else axes[:-1]


def check_shapes(paths: Sequence[str], stored: Sequence[Shape], incoming: Sequence[Shape]) -> None:
    """Compares what is known with what comes in.

    Raises:
      ValueError: they differ in an axis that both know.
    """
    for path, known, found in zip(paths, stored, incoming, strict=True):
        # Rows of lower rank may become sequences; whether they fit is decided by their number.
        if not known or not found or (len(found) in (1, 2) and len(known) > len(found)):
            continue
        differs = any(one and other and one != other for one, other in zip(known, found, strict=False))
        if len(known) != len(found) or differs:
            raise ValueError(
                f"Inconsistent shape founded for input feature {shown_path(path)}, Output shape is set to be {known}, "
                "But got incoming output "
                f"shape {found}. Pass batches of one shape, the last one padded, or set FeatureConfig.output_shape."
            )


def merged_shapes(stored: Sequence[Shape], incoming: Sequence[Shape]) -> list[Shape]:
    """Known shapes and axes stay, unknown ones are taken from what comes in."""
    return [_merged(known, found) for known, found in zip(stored, incoming, strict=True)]


def _merged(known: Shape, found: Shape) -> Shape:
    if not known or len(known) != len(found):
        return known or found
    return tuple(other if axis is None else axis for axis, other in zip(known, found, strict=True))


def require_defined(paths: Sequence[str], shapes: Sequence[Shape]) -> None:
    """Raises ValueError if a shape is unknown, as a whole or on an axis."""
    for path, shape in zip(paths, shapes, strict=True):
        if not shape or any(axis is None for axis in shape):
            remedy = "Set FeatureConfig.output_shape, pass shapes to build, or pass batch_size."
            if any(axis is None for axis in shape[1:]):
                counted = (shape[0], *(axis or 4 for axis in shape[1:]))
                remedy = f"Say how many vectors a sample has, such as output_shape={counted}, or pass shapes to build."
            raise ValueError(
                f"Input Feature {shown_path(path)} has output shape set as {shape or None} which is not fully defined. "
                f"Expected a size on every axis. {remedy}"
            )
