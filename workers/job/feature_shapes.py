"""The shape of each feature's activations in a job: one vector a sample, a sequence of them, or a declared shape.

The first axis is always that of the samples. A host has a share of the batch, so `output_shape` may give that axis as
None or as the job's whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from podembed.embedding.config import FeatureConfig
from podembed.embedding.features.feature_order import FeatureOrder


def inner_shape(name: str, feature: FeatureConfig, *, batch_size: int) -> tuple[int, ...]:
    """The axes between the samples and the width of the table; empty for one vector a sample.

    Raises:
      ValueError: `output_shape` does not begin with the batch, or leaves another axis open.
    """
    shape = feature.output_shape
    if not shape:
        return (feature.max_sequence_length,) if feature.is_sequence else ()
    inner = tuple(axis or 0 for axis in shape[1:])
    found = f"Found output_shape={shape} of feature '{name}' in a job with batch_size={batch_size}."
    if shape[0] not in (None, batch_size):
        whole = (None, *(axis or 1 for axis in shape))
        raise ValueError(
            f"{found} Expected the batch as its first axis, None or {batch_size}. Write output_shape={whole} for "
            f"{math.prod(axis or 1 for axis in shape)} vectors a sample, or leave it out for one."
        )
    if not all(inner):
        raise ValueError(
            f"{found} Expected sizes of at least 1 behind the first axis. Write how many vectors a sample has, such as "
            f"output_shape={(None, *(axis or 4 for axis in shape[1:]))}."
        )
    return inner


def keeps_positions(feature: FeatureConfig, inner: tuple[int, ...]) -> bool:
    """Whether the ids of a sample are cut into a bag for each position, as `TPUEmbedding` does it: all those of a
    sequence. Those of a declared shape where it has room for several vectors a sample.
    """
    return feature.is_sequence or any(axis > 1 for axis in inner)


def tell_order(model: object, features: Mapping[str, FeatureConfig]) -> None:
    """Tells the features to a model that reads them in the order of their declaration, `model.order`."""
    order = getattr(model, "order", None)
    if isinstance(order, FeatureOrder):
        order.tell(features)
