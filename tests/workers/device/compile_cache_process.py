"""One of two JAX processes that form a gang, lose it, and form another one, with their programs kept in between.

Usage: python -m tests.workers.device.compile_cache_process PROCESS CACHE DATA_FOLDER COORDINATOR... Before the first
gang it does what a process that stands by does. Prints a JSON line for each gang: how often the cache was asked, and
how often it knew.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import jax
from jax.extend import backend

from podembed.workers.actors import warm_up
from podembed.workers.device.compile_cache import every_member_writes, use_compile_cache
from podembed.workers.device.gang import join_gang, leave_gang
from podembed.workers.device.model_step import DeviceWorker
from tests.small_job import small_job

NUM_PROCESSES = 2
NUM_SAMPLES = 8


def main() -> None:
    process, cache, folder, *coordinators = sys.argv[1:]
    job = small_job(folder=folder, audit=False)
    warm_up(job)
    use_compile_cache(cache)
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[1]]))
    for coordinator in coordinators:
        events.clear()
        join_gang(coordinator=coordinator, num_processes=NUM_PROCESSES, process=int(process), timeout_s=600)
        with every_member_writes():
            DeviceWorker(job=job, num_samples=NUM_SAMPLES).build(is_restored_later=True)
        found = {"number": jax.process_index(), "asked": events["compile_requests_use_cache"]}
        print(json.dumps(found | {"known": events["cache_hits"]}), flush=True)
        leave_gang()
        backend.clear_backends()


if __name__ == "__main__":
    main()
