"""Asks a server at a given rate, whether it answers or not. Prints one JSON line.

    python benchmarks/open_loop.py http://127.0.0.1:8000/score body.json --rate 100 --seconds 10

Requests come as those of many users do, at random moments (a Poisson process). Each has a connection of its own while
it waits. Its latency counts from the moment at which it was due, so a server that stands still is not forgiven the
requests that it kept from being sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(url: str, body: bytes, *, rate: float, seconds: float) -> dict[str, float]:
    """Latencies in ms, and how many answers were no 200."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    free: list[Connection] = []
    latencies: list[float] = []
    errors = 0

    async def one(due_s: float) -> None:
        nonlocal errors
        # A server may close one that nobody used for a while.
        while free and free[-1][0].at_eof():
            free.pop()[1].close()
        reader, writer = free.pop() if free else await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(request)
        errors += not await _is_right(reader)
        latencies.append(time.perf_counter() - due_s)
        free.append((reader, writer))

    gaps = np.random.default_rng(0).exponential(1 / rate, int(rate * seconds))
    start_s = time.perf_counter() + 0.1
    tasks = []
    for due_s in start_s + np.cumsum(gaps):
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(float(due_s))))
    await asyncio.gather(*tasks)
    for _, writer in free:
        writer.close()
    found = dict(
        zip(("p50_ms", "p95_ms", "p99_ms", "max_ms"), np.percentile(latencies, (50, 95, 99, 100)), strict=True)
    )
    return {"requests": len(latencies), "connections": len(free), "errors": errors} | {
        name: round(1e3 * float(value), 2) for name, value in found.items()
    }


async def _is_right(reader: asyncio.StreamReader) -> bool:
    """Reads an answer, whole or in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:-2])
    if b"content-length" in fields:
        await reader.readexactly(int(fields[b"content-length"]))
    else:
        while int(await reader.readuntil(b"\r\n"), 16):
            await reader.readuntil(b"\r\n")
        await reader.readuntil(b"\r\n")
    return head.startswith(b"HTTP/1.1 200")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("body")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    body = Path(options.body).read_bytes()
    found = asyncio.run(ask(options.url, body, rate=options.rate, seconds=options.seconds))
    print(json.dumps({"rate": options.rate} | found))


if __name__ == "__main__":
    main()
