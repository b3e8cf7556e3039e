"""From a feature's input to bags: one list of ids for each vector that the lookup shall return.

A feature without sequences has a bag for each row of its input. A sequence feature has a bag for each position, so that
the vectors of a sample stay apart. A feature whose output shape holds a multiple of the rows has several bags a sample,
too. Ids beyond the last position are left out. A position without an id is an empty bag, which pools to a zero vector.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from podembed.embedding.features.id_policies import shown_path
from podembed.embedding.ragged import Ragged, by_position

if TYPE_CHECKING:  # `inputs` needs JAX, which processes that only hold rows do not load
    from podembed.embedding.tf.features.inputs import FeatureInput


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
