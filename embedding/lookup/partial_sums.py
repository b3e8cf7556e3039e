"""Bags of a table that is cut: each owner pools the rows that it has, and the host that asked adds up the parts.

Owners only sum. The host that asked divides the total, once, by the denominator of the whole bag, which is what one
process does. Owners divide gradients by the same denominators, which travel with the request. Partial sums are added in
the order of the hosts: ((0 + 1) + 2) + ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.lookup.pooled_frames import BagKeys
from podembed.embedding.lookup.router import Router
from podembed.embedding.ragged import Ragged


def parts_of(router: Router, bags: Ragged, combiner: str, *, num_hosts: int) -> list[BagKeys]:
    """Per owner its part of each bag.

    Args:
      router: router of the whole table.

    Raises:
      ValueError: an id lies outside its table.
    """
    splits, keys, weights = router.route_bags(bags, num_hosts=num_hosts)
    whole = None if combiner == "sum" else denominators(bags.row_splits, bags.weights, combiner)
    parts, first = [], 0
    for of_owner in splits:
        stop = first + int(of_owner[-1])
        own_weights = None if weights is None else weights[first:stop]
        parts.append(BagKeys(keys[first:stop], of_owner, own_weights, whole))
        first = stop
    return parts


def denominators(row_splits: np.ndarray, weights: np.ndarray | None, combiner: str) -> np.ndarray:
    """What the sum over each bag is divided by, by the rules of `kernels.pool`: float32 `[B]`; 1 for an empty bag
    without weights.

    Args:
      combiner: `mean` or `sqrtn`.
    """
    lengths = np.diff(row_splits)
    if weights is None:
        total = np.maximum(lengths, 1).astype(np.float32)
    else:
        # Summed as the kernel does, in float32 and in the order of the ids.
        total = np.zeros(len(lengths), np.float32)
        bag = np.repeat(np.arange(len(lengths)), lengths)
        np.add.at(total, bag, weights if combiner == "mean" else weights * weights)
    return np.sqrt(total) if combiner == "sqrtn" else total


def add_up(parts: Sequence[np.ndarray], own: int, divisors: np.ndarray | None) -> None:
    """Adds the partial sums of all hosts, in their order, into those of one of them; the others are used up.

    Args:
      parts: per host float32 `[B, width]`.
      own: the host whose array gets the total.
      divisors: float32 `[B]`, denominators of the whole bags; where one is 0, the total is 0. None for sums.
    """
    total = parts[0]
    for host, part in enumerate(parts[1:], 1):
        out = parts[own] if host >= own else parts[0]
        np.add(total, part, out=out)
        total = out
    if divisors is None:
        return
    is_zero = divisors == 0
    np.divide(total, np.where(is_zero, np.float32(1), divisors)[:, None], out=total)
    total[is_zero] = 0
