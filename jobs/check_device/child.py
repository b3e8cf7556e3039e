"""The process that works on devices, or on one CPU device for comparison: `python -m podembed.jobs.check_device.child`.

What goes wrong in a compiler may end the process, so `answers.py` begins others. It reads a request in JSON from its
input, and writes a line of JSON for each check to its output. What else is printed goes to its other stream. Arrays
that are to be compared go to a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podembed.jobs.check_device import programs, speeds
from podembed.tools.preflight.answering import answering

_MEASURES = {"copies": speeds.copies, "steps": speeds.steps}
_CHECKS: dict[str, Callable[..., Any]] = {
    "run": programs.of_run,
    "pieces": programs.of_pieces,
    "bits": programs.of_bits,
    **_MEASURES,
}


def main() -> None:
    """Answers one request."""
    request, tell = answering()
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    tell(
        platform=device.platform,
        kind=device.device_kind,
        count=jax.device_count(),
        memory_bytes=memory.get("bytes_limit"),
    )
    for at, check in enumerate(request["checks"]):
        started = time.perf_counter()
        precision = None if check["precision"] == "default" else "highest"
        jax.config.update("jax_default_matmul_precision", precision)
        try:
            found = _CHECKS[check["does"]](request, check)
        except Exception as error:  # told, and the rest goes on
            tell(failed=f"{type(error).__name__}: {error}")
            continue
        seconds = round(time.perf_counter() - started, 2)
        if check["does"] in _MEASURES:
            tell(figures=found, seconds=seconds)
        else:
            # Another file than that of the check before, which may still be read.
            file = f"{request['arrays']}-{at}.npz"
            np.savez(file, **found)
            tell(arrays=file, seconds=seconds)


if __name__ == "__main__":
    main()
