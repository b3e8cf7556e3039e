"""Shapes of activations: declared with the feature, given to `build`, or found from the input, in this order of priority.

A shape here is that of a feature's activations without the last axis, the table's width. An empty one is unknown as a whole; None and 0 on
an axis leave that axis open when shapes are compared. The rules are those of TensorFlow 2.21's `TPUEmbedding`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from embedding.config import FeatureConfig
from embedding.inputs import FeatureInput
from embedding.structures import flatten_up_to, shown_path

Shape = tuple[int | None, ...]


def times(shape: Shape, replicas: int) -> Shape:
    """Per replica → over all replicas; unknown stays unknown."""
    return (None if shape[0] is None else shape[0] * replicas, *shape[1:]) if shape else ()


def share_of(shape: Shape, replicas: int, *, replica: int | None = None) -> Shape:
    """Over all replicas → per replica, rounded down as in TensorFlow; the very share of a `replica` may be one longer, see `bags.share_ends`."""
    if not shape or shape[0] is None:
        return shape
    each, longer = divmod(shape[0], replicas)
    return (each + (replica is not None and replica < longer), *shape[1:])


def num_vectors(shape: Sequence[int | None]) -> int:
    """Vectors in activations of this shape; unknown axes count as 0."""
    return math.prod(int(axis or 0) for axis in shape)


def is_sequence(feature: FeatureConfig) -> bool:
    """Whether rank-2 inputs of this feature keep their positions apart."""
    return not feature.output_shape and feature.max_sequence_length > 0


def shape_of_input(feature_input: FeatureInput, feature: FeatureConfig) -> Shape:
    """The output shape that an input asks for.

    Raises:
      ValueError: a dense input of rank 0 or with a last axis other than 1, or a sparse one below rank 2.
    """
    shape, path = feature_input.shape, shown_path(feature_input.path)
    if feature_input.kind == "dense":
        if len(shape) < 1:
            raise ValueError(
                f"Only rank 1 and above dense tensor is supported, found rank 0 for input {path}. Pass one id for each sample."
            )
        if len(shape) > 1 and shape[-1] != 1:
            raise ValueError(
                f"Rank 2 or above dense tensor should have last dimension as 1, since that dimension is reduced. Found shape {shape} for input "
                f"{path}. Add an axis with array[..., None] to look up each id, or pass Ragged to combine rows."
            )
        return shape if len(shape) == 1 else shape[:-1]
    if len(shape) < 2:
        raise ValueError(
            f"Only rank 2 and above sparse tensor is supported, found rank {len(shape)} for input {path}. Add the axis that counts samples."
        )
    if is_sequence(feature) and len(shape) == 2:
        return (shape[0], feature.max_sequence_length)
    return shape[:-1]


def shapes_of_build(feature_config: Any, features: Sequence[FeatureConfig], given: Any) -> list[Shape]:
    """The output shapes of the input shapes that were given to `build`.

    Args:
      given: the batch size as an int, or input shapes in the structure of `feature_config`, or a flat list of them.

    Raises:
      ValueError, TypeError: another structure, or a shape of unknown or zero rank.
    """
    if isinstance(given, int):
        return shapes_of_batch(features, given)
    return [
        _shape_of_input_shape(shape, feature)
        for shape, feature in zip(_input_shapes(feature_config, len(features), given), features, strict=True)
    ]


def shapes_of_batch(features: Sequence[FeatureConfig], batch_size: int) -> list[Shape]:
    """The output shapes of features that have one sample per element of the batch."""
    return [(batch_size, f.max_sequence_length) if is_sequence(f) else (batch_size,) for f in features]


def _input_shapes(feature_config: Any, num_features: int, given: Any) -> list[Any]:
    if isinstance(given, list | tuple) and len(given) == num_features and all(_is_shape(one) for one in given):
        return list(given)
    return flatten_up_to(feature_config, given, "per_replica_input_shapes")


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(axis is None or isinstance(axis, int) for axis in value)


def _shape_of_input_shape(shape: Any, feature: FeatureConfig) -> Shape:
    if not _is_shape(shape) or len(shape) < 1:
        raise ValueError(
            f"Received input tensor of shape {shape}. Rank must be 1 and above. Pass a tuple such as (batch_size,) or (batch_size, None)."
        )
    axes = tuple(shape)
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
                f"Inconsistent shape founded for input feature {shown_path(path)}, Output shape is set to be {known}, But got incoming output "
                f"shape {found}. Pass batches of one shape, the last one padded, or set FeatureConfig.output_shape."
            )


def merged_shapes(stored: Sequence[Shape], incoming: Sequence[Shape]) -> list[Shape]:
    """Known shapes stay, unknown ones are taken from what comes in."""
    return [known or found for known, found in zip(stored, incoming, strict=True)]


def require_defined(paths: Sequence[str], shapes: Sequence[Shape]) -> None:
    """Raises ValueError if a shape is unknown, as a whole or on an axis."""
    for path, shape in zip(paths, shapes, strict=True):
        if not shape or any(axis is None for axis in shape):
            raise ValueError(
                f"Input Feature {shown_path(path)} has output shape set as {shape or None} which is not fully defined. Expected a size on every "
                "axis. Set FeatureConfig.output_shape, pass shapes to build, or pass batch_size."
            )
