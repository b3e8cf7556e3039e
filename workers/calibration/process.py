"""A child process that measures: `python -m podembed.workers.calibration.process`.

It reads one JSON request from its first line of input, and prints one JSON answer as its last line of output. Between
them an exchange prints the own address and reads those of both hosts. Nothing but JSON crosses the pipe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from podembed.workers.processors import keep_process_to, processors_of
from podembed.workers.storage.records import to_document


def answer(request: Mapping[str, Any]) -> Any:
    """What was measured, as plain JSON values."""
    own = processors_of(int(request["place"]), int(request["of"]), threads=int(request["threads"]))
    if request["measure"] in ("dense", "models"):
        # As in a run, JAX has its threads before they keep to anything.
        import jax

        jax.devices()
    keep_process_to(own)
    # Imported late: one child measures one thing, and JAX takes a second to load.
    match request["measure"]:
        case "lookups":
            from podembed.workers.calibration.lookups import measure_lookups

            return to_document(measure_lookups(num_processes=int(request["processes"])))
        case "dense":
            from podembed.workers.calibration.device import measure_dense

            return to_document(measure_dense())
        case "reading":
            from podembed.workers.calibration.reading import measure_reading

            return list(measure_reading())
        case "exchange":
            from podembed.workers.calibration.exchange import measure_exchange

            token, hosts = bytes.fromhex(request["token"]), int(request["hosts"])
            return measure_exchange(int(request["rank"]), token, num_hosts=hosts, swap=_swap)
        case "models":
            from podembed.workers.calibration.model import measure_model
            from podembed.workers.job.on_devices.moved import on_devices
            from podembed.workers.job.reference import JobReference

            found = []
            for job, samples, names in zip(request["jobs"], request["samples"], request["on_devices"], strict=True):
                moved = on_devices(JobReference(**job).resolve(), names)
                found.append(measure_model(moved, int(samples), ids_per_bag=request["ids_per_bag"]))
            return [to_document(time) for time in found]
        case other:
            raise ValueError(f"Found {other!r} to measure. Expected lookups, dense, models, reading or exchange.")


def _swap(address: tuple[str, int]) -> list[tuple[str, int]]:
    _print(list(address))
    return [(str(host), int(port)) for host, port in _read()]


def _read() -> Any:
    """The next line of the program that measures. Without one that program has ended, and so does this process."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(1)
    return json.loads(line)


def _print(value: Any) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    _print(answer(_read()))


if __name__ == "__main__":
    main()
