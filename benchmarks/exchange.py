"""Two-way exchange between two processes: the mesh against plain sockets, and against Ray objects on request.

Prints one JSON line: per payload size the median milliseconds in which both processes sent and received one payload.
Mesh and plain socket take turns within one pair of processes, so both see the same machine. The plain exchange is what
one would write by hand: `sendall` in a thread while the caller receives. Where the kernel holds the whole payload, it
does without the thread.

    python benchmarks/exchange.py [--ray] [--repeats 21] [--bytes 4096 1048576]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.handshake import MeshIdentity
from podembed.workers.mesh.mesh import Mesh

_SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 50_000_000)
_TIMEOUT_S = 60.0
_KERNEL_HOLDS_BYTES = 64 << 10


def _identity(rank: int) -> MeshIdentity:
    return MeshIdentity(run_id="benchmark", generation=0, token=b"benchmark-token-", rank=rank, num_ranks=2)


def _exchange_by_mesh(mesh: Mesh, step: int, source: np.ndarray, target: np.ndarray) -> None:
    mesh.exchange(tag=Tag.ROWS, step=step, send=[[source], [source]], receive=lambda *_: target, timeout_s=_TIMEOUT_S)


def _exchange_by_socket(connection: socket.socket, source: np.ndarray, target: np.ndarray) -> None:
    sender = None
    if source.nbytes <= _KERNEL_HOLDS_BYTES:
        connection.sendall(source.data)
    else:
        sender = threading.Thread(target=connection.sendall, args=(source.data,))
        sender.start()
    missing = target.data
    while missing.nbytes:
        missing = missing[connection.recv_into(missing) :]
    if sender:
        sender.join()


def _median_ms(durations_s: list[float]) -> float:
    return round(statistics.median(durations_s) * 1e3, 3)


def _measure_rank(rank: int, pipe: Connection, sizes_bytes: list[int], repeats: int) -> None:
    """One of the two processes; sends a list of results per size through the pipe."""
    with (
        Mesh.listen(_identity(rank), bind_address="127.0.0.1") as mesh,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        pipe.send((mesh.address, server.getsockname()))
        addresses = pipe.recv()
        mesh.connect([mesh_address for mesh_address, _ in addresses], timeout_s=_TIMEOUT_S)
        connection = server.accept()[0] if rank == 0 else socket.create_connection(addresses[0][1])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        results = []
        for num_bytes in sizes_bytes:
            source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
            ways: dict[str, Callable[[int], None]] = {
                "mesh_ms": lambda step, s=source, t=target: _exchange_by_mesh(mesh, step, s, t),
                "socket_ms": lambda _, s=source, t=target: _exchange_by_socket(connection, s, t),
            }
            results.append({"bytes": num_bytes} | _take_turns(ways, repeats))
        pipe.send(results)
        connection.close()


def _take_turns(ways: dict[str, Callable[[int], None]], repeats: int) -> dict[str, float]:
    durations_s: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(-2, repeats):
        for name, exchange in ways.items():
            began_s = time.perf_counter()
            exchange(step)
            # The first two rounds touch memory and let the kernel grow its windows.
            if step >= 0:
                durations_s[name].append(time.perf_counter() - began_s)
    return {name: _median_ms(durations) for name, durations in durations_s.items()}


def measure_sockets(sizes_bytes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Mesh and plain socket between two fresh processes, as rank 0 saw them."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        near, far = context.Pipe()
        process = context.Process(target=_measure_rank, args=(rank, far, sizes_bytes, repeats))
        process.start()
        pipes.append(near)
        processes.append(process)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return results[0]


def measure_ray(sizes_bytes: list[int], repeats: int) -> list[float]:
    """The same exchange through Ray's object store, between two actors on two nodes of one machine; milliseconds per
    size.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray
    from ray.cluster_utils import Cluster

    class Peer:
        def __init__(self) -> None:
            self._references: dict[int, Any] = {}
            self._changed = threading.Condition()

        def published(self, step: int) -> list[Any]:
            with self._changed:
                self._changed.wait_for(lambda: step in self._references, _TIMEOUT_S)
                return [self._references[step]]

        def run(self, peer: Any, first_step: int, num_bytes: int, repeats: int) -> float:
            source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
            durations_s = []
            for step in range(first_step, first_step + repeats + 2):
                began_s = time.perf_counter()
                with self._changed:
                    # The peer may still fetch the last one, not those before.
                    self._references.pop(step - 2, None)
                    self._references[step] = ray.put(source)
                    self._changed.notify_all()
                (reference,) = ray.get(peer.published.remote(step))
                np.copyto(target, ray.get(reference))
                durations_s.append(time.perf_counter() - began_s)
            return _median_ms(durations_s[2:])

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"host0": 1}})
    cluster.add_node(num_cpus=1, resources={"host1": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        remote = ray.remote(Peer)
        peers: list[Any] = [
            remote.options(num_cpus=0, resources={f"host{rank}": 1}, max_concurrency=2).remote() for rank in range(2)
        ]
        medians_ms, step = [], 0
        for num_bytes in sizes_bytes:
            runs = [peers[rank].run.remote(peers[1 - rank], step, num_bytes, repeats) for rank in range(2)]
            medians_ms.append(ray.get(runs)[0])
            step += repeats + 2
        return medians_ms
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="Two-way exchange between two processes, median milliseconds.")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(_SIZES_BYTES), help="payload sizes")
    parser.add_argument("--repeats", type=int, default=21, help="exchanges per size")
    parser.add_argument("--ray", action="store_true", help="also measure Ray objects between two nodes (slow to start)")
    arguments = parser.parse_args()
    results = measure_sockets(arguments.bytes, arguments.repeats)
    for result in results:
        result["mesh_over_socket"] = round(result["mesh_ms"] / result["socket_ms"], 2)
    if arguments.ray:
        for result, ray_ms in zip(results, measure_ray(arguments.bytes, arguments.repeats), strict=True):
            result |= {"ray_ms": ray_ms, "ray_over_mesh": round(ray_ms / result["mesh_ms"], 1)}
    print(json.dumps({"benchmark": "exchange", "cpus": os.cpu_count(), "repeats": arguments.repeats, "sizes": results}))


if __name__ == "__main__":
    main()
