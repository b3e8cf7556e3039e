"""`Router`: the host that asks knows which host owns the bucket of a key, and no rows."""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.row_numbers import copy_keys, route, route_bags
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec


class Router:
    """From keys to owners, for one table. Immutable.

    Args:
      spec: spec of the table.
      owners: int `[num_buckets]`, the owner of each bucket; None for a table that one host owns whole.

    Attributes:
      key_dtype: type of a key on the wire; int32 where every key fits.
    """

    def __init__(self, spec: TableSpec, owners: np.ndarray | None = None) -> None:
        self._keys = spec.keys
        self._num_keys = spec.keys.num_keys(spec.layout)
        self._owners = np.zeros(1, np.int32) if owners is None else np.ascontiguousarray(owners, np.int32)
        self.key_dtype = np.dtype(np.int32 if 0 <= self._num_keys <= 1 << 31 else np.int64)

    def route(self, keys: np.ndarray, counts: np.ndarray, routed: np.ndarray, position: np.ndarray) -> None:
        """Sorts distinct keys by owner; arguments as of `kernels.row_numbers.route`."""
        route(keys, self._keys.hashes_of(keys), self._num_keys, self._owners, counts, routed, position)

    def route_bags(self, bags: Ragged, *, num_hosts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Every owner's part of each bag.

        Returns:
          int64 `[num_hosts, B + 1]`, row splits of each owner; `key_dtype` `[n]`, the keys, owner after owner; float32
          `[n]`, their weights, or None.

        Raises:
          ValueError: a key is out of range.
        """
        keys, weights = bags.values, bags.weights
        splits, routed = np.empty((num_hosts, len(bags.row_splits)), np.int64), np.empty(len(keys), self.key_dtype)
        routed_weights = np.empty(0 if weights is None else len(keys), np.float32)
        hashes = self._keys.hashes_of(keys)
        route_bags(keys, hashes, self._num_keys, bags.row_splits, weights, self._owners, splits, routed, routed_weights)
        return splits, routed, None if weights is None else routed_weights

    def copy(self, keys: np.ndarray, out: np.ndarray) -> None:
        """Writes the keys of a table that one host owns whole, as they travel.

        Args:
          keys: int64 `[n]`.
          out: `key_dtype` `[n]`.

        Raises:
          ValueError: a key is out of range.
        """
        copy_keys(keys, self._num_keys, out)
