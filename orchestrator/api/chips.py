"""What the makers of accelerators publish of them: `CHIPS` of TPUs, `GPU_BYTES` of GPUs.

Rates bound what a program can reach. They are nobody's measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipRates:
    """What the maker publishes of one chip.

    Sources: memory, its rate, bfloat16 flops and links are those of https://cloud.google.com/tpu/docs (pages v4, v5e,
    v5p, v6e, tpu7x). The links of v4 and the way to the host are those of https://jax-ml.github.io/scaling-book/tpus.
    Links are published for both directions together, so one direction is half of that.

    Attributes:
      memory_bytes: bytes of memory.
      memory_bytes_s: bytes a second of that memory.
      flops: bfloat16 operations a second. At JAX's default precision, products of float32 are products of bfloat16.
      link_bytes_s: bytes a second that leave by all links to other chips.
      host_bytes_s: bytes a second to or from the host; None where nothing is published.
      devices: devices that JAX sees in a chip. They share it evenly.
    """

    memory_bytes: int
    memory_bytes_s: float
    flops: float
    link_bytes_s: float
    host_bytes_s: float | None
    devices: int = 1


# By generation, as Ray names it.
CHIPS = {
    "v4": ChipRates(memory_bytes=32 * _GIB, memory_bytes_s=1.2e12, flops=275e12, link_bytes_s=270e9, host_bytes_s=16e9),
    "v5litepod": ChipRates(
        memory_bytes=16 * _GIB, memory_bytes_s=819e9, flops=197e12, link_bytes_s=200e9, host_bytes_s=16e9
    ),
    "v5p": ChipRates(
        memory_bytes=95 * _GIB, memory_bytes_s=2.765e12, flops=459e12, link_bytes_s=600e9, host_bytes_s=16e9
    ),
    "v6e": ChipRates(
        memory_bytes=32 * _GIB, memory_bytes_s=1.6e12, flops=918e12, link_bytes_s=400e9, host_bytes_s=32e9
    ),
    "v7x": ChipRates(
        memory_bytes=192 * _GIB,
        memory_bytes_s=7.38e12,
        flops=2307e12,
        link_bytes_s=600e9,
        host_bytes_s=None,
        devices=2,
    ),
}
# Bytes of memory by Ray's names of GPUs, from https://www.nvidia.com (data sheets); where there are several, the least.
GPU_BYTES = {
    "T4": 16_000_000_000,
    "P100": 12_000_000_000,
    "V100": 16_000_000_000,
    "L4": 24_000_000_000,
    "A10G": 24_000_000_000,
    "L40S": 48_000_000_000,
    "A100": 40_000_000_000,
    "H100": 80_000_000_000,
    "H200": 141_000_000_000,
    "B200": 180_000_000_000,
}
