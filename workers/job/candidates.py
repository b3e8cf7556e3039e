"""The candidates of a sample: which feature has them, how many the model scores at once, and in how many parts.

The first id of a sample is the positive one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from podembed.workers.data.columns import IdColumn

# In the place of a feature: the candidates of each sample are a group of their own.
SAMPLE = "sample"


def candidates_problem(feature: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """What is wrong with a feature of candidates, in sentences for the user; None if nothing is.

    Args:
      shapes: of all features, as `JobConfig.activation_shapes`.
    """
    if feature not in shapes:
        return f"Found candidates={feature!r}. Expected a feature of the job. Name one of {list(shapes)}."
    if len(shapes[feature]) < 2:
        return (
            f"Found candidates={feature!r}, whose ids are combined to one vector. Expected a vector for each. "
            "Write FeatureConfig(table, max_sequence_length=5) for 5 candidates."
        )
    return None


def room_problem(feature: str, source: IdColumn, shape: tuple[int, ...]) -> str | None:
    """What is wrong with the room that a feature has for its negatives, or with its weights; None if nothing is."""
    if source.weights is not None and len(shape) > 1:
        return (
            f"Found weights={source.weights!r} for feature {feature!r}, whose ids are not combined. Expected a feature "
            "with one vector a sample. Leave out max_sequence_length and output_shape, or hand the numbers to the "
            f"model: extra=(ListColumn({source.weights!r}, {shape[0]}),)."
        )
    declared = source.negatives
    if declared is None:
        return None
    width, room = declared.width(is_evaluation=False), math.prod(shape[:-1])
    if len(shape) < 2 or room % width:
        found = f"room for {room} vectors a sample" if len(shape) > 1 else "one vector a sample"
        return (
            f"Found {found} for feature {feature!r}, whose column has Negatives({declared.count}). Expected "
            f"{width} for each id. Write FeatureConfig(table, max_sequence_length={width}) for one id a sample, or "
            f"output_shape=(None, length, {width}) for lists."
        )
    return None


def num_parts(source: IdColumn, room: int) -> int:
    """In how many parts an evaluation looks at the candidates of a sample.

    Args:
      room: candidates that are scored at once.
    """
    if source.negatives is None:
        return 1
    return max(1, -(-source.negatives.width(is_evaluation=True) // room))
