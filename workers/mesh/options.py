"""`MeshOptions`: how a mesh runs, and `Route`: how frames travel over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from podembed.workers.faults.frames import Spoil
from podembed.workers.tracing.recorder import Recorder


class Route(StrEnum):
    """How the frames of an exchange travel. The text is what users write and see."""

    AUTO = "auto"
    DIRECT = "direct"
    TWO_HOP = "two-hop"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """How a mesh runs; the same on all hosts.

    Attributes:
      max_frame_bytes: longest payload one host may send another in one exchange.
      payload_crc: whether payloads carry a checksum, about 0.2 ms per MB and direction on top of TCP's own.
      handshake_timeout_s: how long one connection may take to prove itself.
      socket_buffer_bytes: fixed kernel buffers; None lets the kernel tune them, which is best where `rmem_max` is
        small.
      spoil: injects faults into frames; this host's own.
      trace: takes the exchanges with each host while a trace is on; this host's own.
    """

    max_frame_bytes: int = 4 << 30
    payload_crc: bool = False
    handshake_timeout_s: float = 5.0
    socket_buffer_bytes: int | None = None
    spoil: Spoil | None = None
    trace: Recorder = field(default_factory=Recorder)
