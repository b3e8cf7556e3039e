"""`podembed train --in-process` that is interrupted twice, as by an impatient person, at one moment of its second
commit.

Usage: python -m tests.faults.interrupted_process before|after|hung ARGUMENTS. `before` and `after` mean the manifest's
creation, which goes on in the publishing thread whatever happens to the main one; with `hung` the storage does not
answer for long at that moment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.signals import StopSignals
from podembed.orchestrator.commit.lease import Lease

HANGS_S = 900.0
taken = threading.Semaphore(0)


def interrupt(moment: str) -> None:
    """Makes the second commit the one in which the signals come."""
    publish, num_published = Lease.publish, 0

    def interrupted(self: Lease, *arguments: Any) -> None:
        nonlocal num_published
        num_published += 1
        if num_published == 2 and moment in ("before", "hung"):
            _send()
        if num_published == 2 and moment == "hung":
            time.sleep(HANGS_S)
        publish(self, *arguments)
        if num_published == 2 and moment == "after":
            _send()

    Lease.publish = interrupted  # type: ignore[method-assign]
    take = StopSignals._on_signal

    def noted(self: StopSignals, *arguments: Any) -> None:
        try:
            take(self, *arguments)
        finally:
            taken.release()

    StopSignals._on_signal = noted  # type: ignore[method-assign]


def _send() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        # The main thread takes a signal between two of its instructions; two at once may count as one.
        taken.acquire()


if __name__ == "__main__":
    interrupt(sys.argv.pop(1))
    sys.exit(main())
