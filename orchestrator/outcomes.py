"""From the way a command ended to an exit code and words for the person at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from orchestrator.config import ConfigurationError
from orchestrator.errors import (
    EXIT_CONFIGURATION,
    EXIT_CRASH_LOOP,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    CrashLoop,
    DataFailed,
    JobFailed,
    TooFewHosts,
    WorkerRefused,
)
from orchestrator.lease import Fenced, RunIsHeld
from orchestrator.run_record import RunMismatch
from orchestrator.signals import StoppedAtStart
from workers.data_config import DataConfigError
from workers.fault_plan import FaultPlanError
from workers.finished_folder import FolderError
from workers.input_errors import InputError
from workers.job import JobError
from workers.quality import QualityError
from workers.storage_errors import StorageError

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
    """Runs a command; prints one clear message for an outcome that is known, and lets anything else show its traceback."""
    try:
        return command()
    except KeyboardInterrupt:
        print("\nInterrupted. What was committed stands.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except StoppedAtStart:
        print("podembed: stopped before the first step. What was committed stands.", file=sys.stderr)
        return EXIT_STOPPED
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
