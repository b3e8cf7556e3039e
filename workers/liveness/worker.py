"""`Worker`: the name of one process of a run, wherever processes have names. Its text form is for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkerKind = Literal["host", "device"]


@dataclass(frozen=True, slots=True, order=True)
class Worker:
    """One process: the host process or the device process of a host.

    Attributes:
      kind: which of the two.
      number: number of its host, from 0.
    """

    kind: WorkerKind
    number: int

    @property
    def is_host(self) -> bool:
        return self.kind == "host"

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"
