"""`podembed calibrate`: measures this machine's constants and writes them to a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure what this machine takes for the parts of a step: memory, kernels, messages, reading, a dense step.

    Trains made-up jobs for some seconds each, too. Takes some minutes; other programs falsify it. `podembed plan`
    and `train` predict from the file.
    """

    out: str | None = None
    """File to write. Default: ~/.podembed/calibration.json, where plan and train look for it."""
    threads_per_host: int = 1
    """Threads of a host's kernels and CPU device, as for train."""


def calibrate(command: Calibrate) -> int:
    """Carries out the command. Returns the exit code.

    Raises:
      MeasuringFailed: as `workers.calibration.measure.calibrate`.
      OSError: the file cannot be written.
    """
    # Imported late: `--help` should not wait for them.
    from podembed.orchestrator.prediction.constants_table import rendered
    from podembed.orchestrator.prediction.dense_half import children_environment, default_path
    from podembed.orchestrator.prediction.pods import with_pods
    from podembed.version import version
    from podembed.workers.calibration.measure import calibrate as measure
    from podembed.workers.calibration.record import this_machine, write_calibration

    began = time.monotonic()
    environment = children_environment(command.threads_per_host)

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    alone = measure(
        machine=this_machine(),
        environment=environment,
        threads=command.threads_per_host,
        code=version(),
        now_unix_s=time.time(),
        activity=tell,
    )
    found = with_pods(alone, environment=environment, activity=tell)
    path = Path(command.out).expanduser() if command.out else default_path()
    write_calibration(path, found)
    print(f"\n{rendered(found)}\n\nwritten to {path} after {time.monotonic() - began:.1f} s")
    return 0
