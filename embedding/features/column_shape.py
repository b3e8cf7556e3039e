"""`ColumnShape`: what each sample has in a named column of a batch, such as a label or a vector."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """Shape and type of one sample's part of a column.

    Attributes:
      inner: the axes behind that of the samples; empty for one number a sample.
      dtype: numpy's name of the type: `float32`, `int32` or `uint32`, which are all 4 bytes wide.
    """

    inner: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Numbers of one sample."""
        return math.prod(self.inner)

    def zeros(self, num_samples: int) -> np.ndarray:
        """`[num_samples, *inner]`, as padding has them."""
        return np.zeros((num_samples, *self.inner), self.dtype)
