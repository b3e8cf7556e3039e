"""Trains on sequences of real lengths over two devices of the processor, with much smaller rooms than usual. Prints the
losses and how many programs were compiled, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

from podembed import SilentReporter
from podembed.orchestrator.events.event import Event
from podembed.workers.job import padding
from tests.workers.host.test_sequences import Reading, sequence_job, trained


class Told(SilentReporter):
    """What events say of programs that were compiled in the run."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []

    def event(self, event: Event) -> None:
        if event.kind == "programs_compiled":
            self.compiled.append(event.values())


def main(folder: str) -> None:
    padding.LEAST_VECTORS, padding.LEAST_LENGTH, padding.MULTIPLE = 16, 2, 16
    told = Told()
    losses = trained(sequence_job(Path(folder), Reading("rows")), Path(folder) / "two_devices", told)
    json.dump({"losses": losses, "compiled": told.compiled}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
