"""From the way a command ended to an exit code and words for the person at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from podembed.jobs.finished_folder import FolderError
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import (
    EXIT_CONFIGURATION,
    EXIT_CRASH_LOOP,
    EXIT_USER_ERROR,
    CrashLoop,
    DataFailed,
    JobFailed,
    TooFewHosts,
    WorkerRefused,
)
from podembed.orchestrator.commit.holder import RunIsHeld
from podembed.orchestrator.commit.lease import Fenced
from podembed.orchestrator.commit.run_record import RunMismatch
from podembed.workers.data.columns import DataConfigError
from podembed.workers.data.input_errors import InputError
from podembed.workers.faults.plan import FaultPlanError
from podembed.workers.job.job import JobError
from podembed.workers.job.quality import QualityError
from podembed.workers.storage.storage_errors import StorageError

EXIT_INTERRUPTED = 130

# What the user can mend; a traceback would hide the sentence that says how.
_EXPECTED = (
    ConfigurationError,
    DataConfigError,
    FaultPlanError,
    FolderError,
    InputError,
    JobError,
    QualityError,
    RunMismatch,
    StorageError,
    WorkerRefused,
)


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command; prints one clear message for an outcome that is known, and lets anything else show its
    traceback.
    """
    try:
        return command()
    except KeyboardInterrupt:
        print("\nInterrupted. What was committed stands.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (Fenced, RunIsHeld, TooFewHosts) as error:
        print(f"podembed: {error}", file=sys.stderr)
        return error.exit_code
    except JobFailed as error:
        print(f"podembed: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, DataFailed) else EXIT_USER_ERROR
    except CrashLoop as error:
        print(f"podembed: {error}", file=sys.stderr)
        return EXIT_CRASH_LOOP
    except _EXPECTED as error:
        print(f"podembed: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
