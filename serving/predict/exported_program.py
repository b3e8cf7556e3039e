"""`Program`: the forward pass as an export has it, and how many samples it takes at once.

The text of this file lies in `served_model.py`, so nothing here imports anything of podembed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.export
import numpy as np

FEWEST_SAMPLES = 64


class Program:
    """A program `(dense, inputs) -> outputs`, compiled for each number of samples. Mutated: how many it takes at once.

    Args:
      exported: as `jax.export` has it.
    """

    def __init__(self, exported: jax.export.Exported) -> None:
        self._call = jax.jit(exported.call)
        (_, inputs), _ = jax.tree_util.tree_unflatten(exported.in_tree, exported.in_avals)
        self._inputs = {name: (tuple(map(int, one.shape[1:])), np.dtype(one.dtype)) for name, one in inputs.items()}
        self._most: dict[int, int] = {}

    def __call__(self, dense: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.asarray(values) for name, values in self._call(dense, inputs).items()}

    def most_samples(self, dense: Mapping[str, Any], most: int) -> int:
        """The largest size at which scores have the bits that they have among 64, as made-up samples show it.

        On CPUs XLA may sum a larger array in other pieces, so that its last bits differ. Sizes below the largest one
        are alike.

        Args:
          most: a power of two, at least 64.
        """
        if most not in self._most:
            size = most
            while size > FEWEST_SAMPLES and not self._has_bits_of_few(dense, size):
                size //= 2
            self._most[most] = size
        return self._most[most]

    def _has_bits_of_few(self, dense: Mapping[str, Any], size: int) -> bool:
        random = np.random.Generator(np.random.Philox(0))
        inputs = {}
        for name, (shape, dtype) in self._inputs.items():
            shape = (size, *shape)
            is_float = np.issubdtype(dtype, np.floating)
            values = random.normal(size=shape) if is_float else random.integers(0, 2, shape)
            inputs[name] = values.astype(dtype)
        found = self(dense, inputs)
        for start in range(0, size, FEWEST_SAMPLES):
            stop = start + FEWEST_SAMPLES
            few = self(dense, {name: values[start:stop] for name, values in inputs.items()})
            if any(few[name].tobytes() != values[start:stop].tobytes() for name, values in found.items()):
                return False
        return True


def padded_size(count: int) -> int:
    """With how many samples the program is called for so many, as `podembed predict` does. With fewer than 64, or a
    size between powers of two, scores have other last bits.
    """
    return max(FEWEST_SAMPLES, 1 << max(0, count - 1).bit_length())
