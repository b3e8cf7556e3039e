"""Where all processes of the tests keep what JAX compiles, since most of them compile the same programs."""

from __future__ import annotations

import sys
from pathlib import Path

# `make test` begins with an empty one, so that no run is shorter than another.
FOLDER = Path(sys.prefix, "compiled")


def compiled_in(folder: Path) -> dict[str, str]:
    """The variables by which JAX keeps every program in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
