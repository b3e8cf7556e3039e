"""`python -m tests.serving.campaign --seeds 1000 --kills 30 --bodies 100000 --load-seconds 3600`. Prints one JSON line
for each part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.processes import free_port
from tests.serving.campaign.bodies import run_bodies
from tests.serving.campaign.kills import Client, Served, publish, run_kills, until
from tests.serving.campaign.schedule import Base, quiet, simulate


def _tell(part: str, began_s: float, found: dict[str, object]) -> None:
    print(json.dumps({"part": part, "seconds": round(time.monotonic() - began_s, 1), **found}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--bodies", type=int, default=0)
    parser.add_argument("--load-seconds", type=int, default=0)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    quiet()
    memory = "/dev/shm" if sys.platform == "linux" else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        base = Base.made(folder / "base")
        if options.seeds:
            began_s, counts = time.monotonic(), Counter[str]()
            seeds = range(options.first, options.first + options.seeds)
            # Threads of JAX do not survive a fork.
            with multiprocessing.get_context("spawn").Pool(options.processes, initializer=quiet) as pool:
                parts = [
                    (base, folder / f"seeds-{at}", seeds[at :: options.processes]) for at in range(options.processes)
                ]
                for found in pool.starmap(simulate, parts, chunksize=1):
                    counts += found
            _tell("simulation", began_s, {"seeds": len(seeds), **dict(sorted(counts.items()))})
        if options.kills:
            began_s = time.monotonic()
            ports = [free_port() for _ in range(4)]
            _tell("kills", began_s, run_kills(base, folder, kills=options.kills, seed=options.first, ports=ports))
        if options.bodies:
            _bodies(base, folder, options.bodies, options.first)
        if options.load_seconds:
            _load(base, folder, options.load_seconds, options.first)


def _bodies(base: Base, folder: Path, count: int, seed: int) -> None:
    publish(base, base.commits[-1]).wait()
    began_s, port = time.monotonic(), free_port()
    with Served(["serve", str(base.run), "--port", str(port)], folder) as served:
        with Client(base, port) as client:
            until(lambda: bool(client.counts["right"]), 120, "an answer")
        process = psutil.Process(served.process.pid)
        before = process.memory_info().rss >> 20
        found = run_bodies(base, port=port, count=count, seed=seed)
        memory = {"mib_before": before, "mib_after": process.memory_info().rss >> 20}
        _tell("bodies", began_s, {**found, **memory})


def _load(base: Base, folder: Path, seconds: int, seed: int) -> None:
    """Clients ask all the time, while versions come and go."""
    publish(base, base.commits[0]).wait()
    began_s, port, choose, memory = time.monotonic(), free_port(), random.Random(seed), list[int]()
    with Served(["serve", str(base.run), "--port", str(port)], folder) as served, ExitStack() as stack:
        clients = [stack.enter_context(Client(base, port)) for _ in range(4)]
        until(lambda: all(client.counts["right"] for client in clients), 120, "an answer")
        process, swaps = psutil.Process(served.process.pid), 0
        while time.monotonic() < began_s + seconds:
            swaps += publish(base, choose.choice(base.commits)).wait() == 0
            time.sleep(10)
            memory.append(process.memory_full_info().uss >> 20)
        wrong = [one for client in clients for one in client.wrong]
        assert not wrong, wrong[:5]
        counts = sum((client.counts for client in clients), Counter[str]())
        tenths = [memory[at * len(memory) // 10] for at in range(10)] + memory[-1:]
        _tell("load", began_s, {**counts, "offers": swaps, "mib": tenths})


if __name__ == "__main__":
    main()
