"""How an attempt or a run can end badly, as types. Every one says what was found, what was expected and what to do.

Exit codes are for `supervise` and shells: 1 the job's own error, 85 stopped by a signal after a commit, 86 fenced by another driver,
87 a configuration that cannot work, 88 host faults one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

EXIT_USER_ERROR = 1
EXIT_STOPPED = 85
EXIT_FENCED = 86
EXIT_CONFIGURATION = 87
EXIT_CRASH_LOOP = 88


class FailureKind(Enum):
    """What the driver saw of a failing process."""

    DIED = "died"  # Ray reports that the process is gone
    HUNG = "hung"  # no answer, or no finished step, within the deadline
    PEER = "peer"  # it lives, and says that another one is gone
    ERROR = "error"  # an exception of the job, its data or our code


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One process's failure.

    Attributes:
      worker: label such as `host 1` or `device 0`.
      message: the first line.
      details: a traceback, where there is one.
      is_refusal: whether it is an error of data, storage or settings, which says itself what to mend.
    """

    worker: str
    kind: FailureKind
    message: str
    details: str = ""
    is_refusal: bool = False


class WorkerRefused(RuntimeError):
    """A worker refused its data, its storage or a setting; the message says what to mend, and a traceback would hide it."""


class WorkerFailure(RuntimeError):
    """Calls to one or several workers failed.

    Attributes:
      failures: in the order in which the driver learnt of them.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__("; ".join(f"{f.worker} {f.kind.value}: {f.message}" for f in self.failures))


class JobFailed(RuntimeError):
    """The job itself, its data or its model raised; running it again would raise again."""


class CrashLoop(RuntimeError):
    """Host faults came one after another without a commit in between."""


def cause(failures: Sequence[Failure]) -> str:
    """One line that names the root of a group of failures: processes that died before those that hung before those that report peers."""
    order = [FailureKind.DIED, FailureKind.HUNG, FailureKind.ERROR, FailureKind.PEER]
    first = min(failures, key=lambda failure: order.index(failure.kind))
    return f"{first.worker} {_VERB[first.kind]}: {first.message}"


_VERB = {
    FailureKind.DIED: "died",
    FailureKind.HUNG: "hung",
    FailureKind.ERROR: "failed",
    FailureKind.PEER: "lost a peer",
}


def is_host_fault(failures: Sequence[Failure]) -> bool:
    """Whether new processes may help. An exception beside a dead, hung or lost process is its echo (a collective that lost a member):
    a worker that raises lives on and keeps its connections, so its own exception makes nobody else report a lost peer."""
    return any(failure.kind is not FailureKind.ERROR for failure in failures)
