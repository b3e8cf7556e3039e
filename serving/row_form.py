"""`RowForm`: in which form rows lie in a copy for servers, and which keys it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.served_files import SCALE
from podembed.workers.checkpoint.checkpoint_files import ROWS

FORMS = ("float32", "bfloat16", "int8")
_LARGEST = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """See the module.

    Attributes:
      rows: one of `FORMS`.
      min_count: keys of tables with a capacity that were seen less often are left out.
    """

    rows: str = "float32"
    min_count: int = 0

    def __post_init__(self) -> None:
        if self.rows not in FORMS:
            raise ConfigurationError(f"Found --rows {self.rows!r}. Expected one of {', '.join(FORMS)}. Choose one.")
        if self.min_count < 0:
            raise ConfigurationError(
                f"Found --min-count {self.min_count}. Expected 0 or more. Leave it out for all keys."
            )

    @property
    def is_plain(self) -> bool:
        """Whether files are those of the run."""
        return self.rows == "float32" and not self.min_count

    def encoded(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays that rows become.

        Args:
          values: float32 `[n, dim]`, all finite.
        """
        if self.rows == "bfloat16":
            return {ROWS: values.astype(ml_dtypes.bfloat16)}
        if self.rows == "int8":
            scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(_LARGEST)
            # What is so small that its scale is 0 is 0, too.
            quotients = np.rint(values / np.where(scale == 0, np.float32(1), scale))
            return {ROWS: np.clip(quotients, -_LARGEST, _LARGEST).astype(np.int8), SCALE: scale}
        return {ROWS: values}

    def served(self, values: np.ndarray) -> np.ndarray:
        """What servers make of rows, float32 `[n, dim]`."""
        return decoded(self.encoded(values)) if self.rows != "float32" else values


def decoded(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """float32 `[n, dim]` of the arrays of `RowForm.encoded`; float32 is given back as it is."""
    rows = arrays[ROWS]
    if rows.dtype == np.float32:
        return rows
    values = rows.astype(np.float32)
    return values * arrays[SCALE] if SCALE in arrays else values
