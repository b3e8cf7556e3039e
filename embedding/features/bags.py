"""From a feature's input to bags: one list of ids for each vector that the lookup shall return.

A feature without sequences has a bag for each row of its input. A sequence feature has a bag for each position, so that
the vectors of a sample stay apart. A feature whose output shape holds a multiple of the rows has several bags a sample,
too. Ids beyond the last position are left out. A position without an id is an empty bag, which pools to a zero vector.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from podembed.embedding.features.structures import shown_path
from podembed.embedding.ragged import Ragged

if TYPE_CHECKING:  # `inputs` needs JAX, which processes that only hold rows do not load
    from podembed.embedding.features.inputs import FeatureInput


def bags_of(feature_input: FeatureInput, *, num_bags: int, is_sequence: bool) -> Ragged:
    """Cuts an input into `num_bags` bags.

    Args:
      is_sequence: keep positions apart even where there is one bag a row.

    Raises:
      ValueError: the bags are no multiple of the rows.
    """
    num_rows = feature_input.num_rows
    if num_bags == num_rows and not is_sequence:
        return Ragged(feature_input.ids, feature_input.row_splits, feature_input.weights)
    positions = num_bags // num_rows if num_rows else 0
    if positions * num_rows != num_bags or (num_rows and positions == 0):
        raise ValueError(
            f"Found {num_rows} rows in input {shown_path(feature_input.path)}. Expected {num_bags}, the product of its "
            "output shape, or a divisor of it, whose rows then become sequences. Change the batch or the output shape."
        )
    rows = Ragged(feature_input.ids, feature_input.row_splits, feature_input.weights)
    return by_position(rows, positions, columns=feature_input.columns)


def by_position(rows: Ragged, positions: int, *, columns: np.ndarray | None = None) -> Ragged:
    """Cuts every row into bags, one for each position; ids beyond the last position are left out.

    Args:
      columns: int64 `[num_ids]`, the position of each id in its row, rising; None where they count from 0.
    """
    splits = rows.row_splits
    row = np.repeat(np.arange(rows.num_samples), np.diff(splits))
    position = np.arange(rows.num_ids) - splits[row] if columns is None else columns
    kept = position < positions
    # Rows come in order and columns within a row do too, so bags never fall.
    bag = row[kept] * positions + position[kept]
    bag_splits = np.zeros(rows.num_samples * positions + 1, np.int64)
    np.cumsum(np.bincount(bag, minlength=len(bag_splits) - 1), out=bag_splits[1:])
    return Ragged(rows.values[kept], bag_splits, None if rows.weights is None else rows.weights[kept])


def split_bags(bags: Ragged, first_axis: int, num_shares: int) -> list[Ragged]:
    """Cuts bags into shares along the first axis of the feature's output, the first shares one longer where it does not
    divide.

    Args:
      first_axis: length of that axis; the bags are a multiple of it.
    """
    if num_shares == 1:
        return [bags]
    ends = share_ends(bags.num_samples, first_axis, num_shares)
    splits, shares = bags.row_splits, []
    for start, stop in pairwise(ends):
        first, last = int(splits[start]), int(splits[stop])
        weights = None if bags.weights is None else bags.weights[first:last]
        own = splits[start : stop + 1]
        shares.append(Ragged(bags.values[first:last], own - first if first else own, weights))
    return shares


def share_ends(num_bags: int, first_axis: int, num_shares: int) -> list[int]:
    """Where each share of the bags begins, and where the last one ends."""
    each, longer = divmod(first_axis, num_shares)
    bags_each = num_bags // first_axis if first_axis else 0
    return [(share * each + min(share, longer)) * bags_each for share in range(num_shares + 1)]
