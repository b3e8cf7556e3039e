"""Constants of a machine that is made up, round enough to follow by hand."""

from __future__ import annotations

from podembed.embedding.costs.constants import Counts, Kernels, MemoryCurve
from podembed.workers.calibration.record import (
    FORMAT,
    Calibration,
    Correction,
    Dense,
    Machine,
    PodCorrections,
    Waiting,
    Wire,
)

MACHINE = Machine(processor="testing", cpus=2)
KEYS = [
    *("dedup/pooled", "dedup/partial", "dedup/rows", "id exchange/pooled", "id exchange/rows"),
    *("group/pooled", "split/pooled", "split/rows", "gather/rows", "pool/pooled", "pool/rows", "sums/partial"),
    *("gradient sum/rows", "update/pooled", "update/rows"),
]
MEMORY = MemoryCurve(size_bytes=(1 << 16, 1 << 28), row_ns=(2.0, 10.0))


def kernels(num_processes: int, slower: float = 1.0) -> Kernels:
    """10 µs a call, 10 ns an id and a bag, 20 ns a row that no cache has, and a line of one that is updated."""
    grouped = Counts(hashed_ids=10.0, marked_ids=10.0, counted_ids=10.0)
    others = Counts(calls=10_000.0, ids=10.0, bags=10.0, rows_from_memory=20.0, row_lines=20.0)
    factors = ((grouped + others) * slower).values
    return Kernels(
        num_processes=num_processes,
        memory=MEMORY,
        factors_ns=dict.fromkeys(KEYS, factors),
        errors=dict.fromkeys(KEYS, 0.1),
    )


CALIBRATION = Calibration(
    format=FORMAT,
    code="0.0",
    machine=MACHINE,
    measured_unix_s=1.0,
    threads=1,
    kernels=(kernels(1), kernels(2, slower=2.0)),
    wire=Wire(exchange_s=5e-5, peer_s=5e-5, byte_s=1e-9),
    dense={"1": Dense(step_s=1e-4, flop_s=1e-11, byte_s=1e-10), "2": Dense(step_s=2e-4, flop_s=2e-11, byte_s=2e-10)},
    sample_s=1e-6,
    id_s=1e-8,
)

CORRECTIONS = PodCorrections(
    hosts=1,
    phases={
        "update": Correction(factor=2.0, constant_s=1e-3),
        "dedup": Correction(call_s=1e-5),
        "between phases": Correction(constant_s=5e-4),
    },
    device=Correction(factor=1.0, constant_s=2e-3),
    waiting=Waiting(meeting_s=1e-4, device_s=3e-4),
    reading=1.0,
)
