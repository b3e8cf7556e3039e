"""Trains on sequences of real lengths over two devices of the processor, with much smaller rooms than usual. Prints the
losses and how many programs were compiled, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

from podembed.workers.device.step_programs import StepPrograms
from podembed.workers.job import sequence_rooms
from tests.workers.host.test_sequences import Reading, sequence_job, trained


def main(folder: str) -> None:
    sequence_rooms.LEAST_VECTORS, sequence_rooms.LEAST_LENGTH = 16, 2
    compiled: list[int] = []
    at = StepPrograms.at

    def counting(programs: StepPrograms, levels: sequence_rooms.Levels) -> object:
        found = at(programs, levels)
        compiled.append(programs.num_compiled)
        return found

    StepPrograms.at = counting  # type: ignore[method-assign]
    losses = trained(sequence_job(Path(folder), Reading("rows")), Path(folder) / "two_devices")
    json.dump({"losses": losses, "compiled": compiled[-1]}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
