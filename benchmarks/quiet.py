"""What the caches keep over a pause: whether others use this machine's caches just now. Prints one JSON line.

    python benchmarks/quiet.py

A process reads 2 MB, line by line in an order that no processor foresees. It does so again at once, and again after a
pause. On a quiet machine both take nearly the same. Where others use the caches meanwhile, the lines come from memory
after a pause. Programs on this machine show as load, other virtual machines do not. Steps of several processes then
take up to one and a half times as long, although one process alone is as fast as ever.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np
from numba import njit

_LINE_NUMBERS = 16


@njit
def _walk(chain: np.ndarray, count: int) -> int:
    at = 0
    for _ in range(count):
        at = chain[at]
    return at


def chain_of(num_lines: int) -> np.ndarray:
    """Each line says where the next one is, and the last one leads back to the first, int32."""
    order = np.random.default_rng(0).permutation(num_lines)
    chain = np.zeros(num_lines * _LINE_NUMBERS, np.int32)
    chain[order * _LINE_NUMBERS] = np.roll(order, -1) * _LINE_NUMBERS
    return chain


def line_ns(chain: np.ndarray, *, pause_s: float, repeats: int) -> list[float]:
    """Nanoseconds of a line, each time after a pause."""
    count, found = len(chain) // _LINE_NUMBERS, []
    _walk(chain, count)
    for _ in range(repeats):
        time.sleep(pause_s)
        began = time.perf_counter()
        _walk(chain, count)
        found.append(1e9 * (time.perf_counter() - began) / count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=2.0, help="of memory that is read")
    parser.add_argument("--pause-ms", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    chain = chain_of(int(arguments.mb * (1 << 20)) // (4 * _LINE_NUMBERS))
    hot = statistics.median(line_ns(chain, pause_s=0.0, repeats=arguments.repeats))
    after = line_ns(chain, pause_s=1e-3 * arguments.pause_ms, repeats=arguments.repeats)
    line = {
        "benchmark": "quiet",
        "line_ns": round(hot, 1),
        "line_ns_after_a_pause": round(statistics.median(after), 1),
        "ninth_tenth_ns": round(float(np.quantile(after, 0.9)), 1),
        "load1": os.getloadavg()[0],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
