"""Where all processes of the tests keep what JAX compiles, since most of them compile the same programs."""

from __future__ import annotations

import sys
from pathlib import Path

# `make test` begins with an empty one, so that no run is shorter than another.
FOLDER = Path(sys.prefix, "compiled")


def compiled_in(folder: Path) -> dict[str, str | float]:
    """The settings by which JAX keeps every program in a folder. In capitals they are variables of an environment."""
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def variables(settings: dict[str, str | float]) -> dict[str, str]:
    return {name.upper(): str(value) for name, value in settings.items()}
