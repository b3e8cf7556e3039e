"""How an attempt or a run can end badly, as types. Every one says what was found, what was expected and what to do.

Exit codes are for `supervise` and shells. 1 is the job's own error, 85 a stop by a signal after a commit, and 86 a run
that another driver took. 87 is a configuration that cannot work, and 88 host faults one after another. 89 is fewer
hosts than the run needs, or no Ray cluster, for too long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from podembed.workers.data.input_errors import InputError
from podembed.workers.job.job import JobError
from podembed.workers.liveness.worker import Worker
from podembed.workers.storage.storage_errors import StorageError

EXIT_USER_ERROR = 1
EXIT_STOPPED = 85
EXIT_FENCED = 86
EXIT_CONFIGURATION = 87
EXIT_CRASH_LOOP = 88
EXIT_TOO_FEW_HOSTS = 89


class FailureKind(Enum):
    """What the driver saw of a failing process."""

    DIED = "died"  # Ray reports that the process is gone
    HUNG = "hung"  # no answer, or no finished step, within the deadline
    PEER = "peer"  # it lives, and says that another one is gone
    DAMAGED = "damaged"  # it lives, and its rows were not those of the commit
    ERROR = "error"  # an exception of the job, its data or our code


class WorkerRefused(RuntimeError):
    """A worker refused its data, its storage or a setting; the message says what to mend, and a traceback would hide
    it. Where a public type has the same meaning, it is one of those below.
    """


class DataRefused(WorkerRefused, InputError):
    """A worker refused its data: an `InputError`, whichever process found it."""


class StorageRefused(WorkerRefused, StorageError):
    """A worker's storage refused or failed: a `StorageError`."""


class JobRefused(WorkerRefused, JobError):
    """A worker refused the job's declaration: a `JobError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One process's failure.

    Attributes:
      worker: which process; None where it is the cluster as a whole.
      message: the first line.
      details: a traceback, where there is one.
      refusal: the public type of an error of data, storage or settings, which says itself what to mend.
      is_preemption: whether its machine was announced to go.
      memory: `host` or `device`, where that ran out.
      is_storage: whether it is an error of the storage that may pass; of a save, it loses that save and nothing else.
      unreached: the workers whose machines gave it no sign of life.
      error: the exception itself, where another process raised one; its cause has the traceback.
      ended_unix_s: when a process ended, by the clock of the cluster's head; None where it is unknown.
    """

    worker: Worker | None
    kind: FailureKind
    message: str
    details: str = ""
    refusal: type[WorkerRefused] | None = None
    is_preemption: bool = False
    memory: str = ""
    is_storage: bool = False
    unreached: tuple[Worker, ...] = ()
    error: Exception | None = field(default=None, compare=False, repr=False)
    ended_unix_s: float | None = field(default=None, compare=False)


class WorkerFailure(RuntimeError):
    """Calls to one or several workers failed.

    Attributes:
      failures: in the order in which the driver learnt of them.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        groups: dict[tuple[str, str], list[Worker | None]] = {}
        for failure in self.failures:
            groups.setdefault((failure.kind.value, failure.message), []).append(failure.worker)
        super().__init__("; ".join(f"{listed(who)} {kind}: {text}" for (kind, text), who in groups.items()))


class JobFailed(RuntimeError):
    """The job itself, its data or its model raised; running it again would raise again."""


class DataFailed(JobFailed, InputError):
    """Too much of the job's data is malformed, over all hosts. What one host finds alone ends the run with the same
    code.
    """

    exit_code = EXIT_CONFIGURATION


class CrashLoop(RuntimeError):
    """Host faults came one after another without a commit in between."""


class TooFewHosts(RuntimeError):
    """The cluster had fewer hosts than the run needs, for too long."""

    exit_code = EXIT_TOO_FEW_HOSTS


class ClusterNotStarted(TooFewHosts):
    """Ray did not start, or did not let the program join; nothing is wrong with the job, and another try may do."""


def cause(failures: Sequence[Failure]) -> str:
    """One line that names the root of a group of failures: processes that died before those that hung before those that
    report peers. Processes that failed alike are named together, but not those that ended because of the first one.
    """
    order = [FailureKind.DIED, FailureKind.HUNG, FailureKind.DAMAGED, FailureKind.ERROR, FailureKind.PEER]
    ended = [f.worker for f in echoes(failures)]
    failures = [f for f in failures if f.kind is not FailureKind.DIED or f.worker not in ended]
    first = min(failures, key=lambda failure: order.index(failure.kind))
    alike = [
        f for f in failures if (f.kind, f.message, f.is_preemption) == (first.kind, first.message, first.is_preemption)
    ]
    verb = "lost its machine" if first.is_preemption and first.kind is not FailureKind.PEER else _VERB[first.kind]
    text = f"{listed([failure.worker for failure in alike])} {verb}: {first.message}"
    return f"{text.rstrip('.')}; {listed(ended)} ended after that" if ended else text


def echoes(failures: Sequence[Failure]) -> list[Failure]:
    """Device processes that JAX ended because another member of the gang was gone.

    These are all but the first one that died, and but those beside a host process that died. Empty where it is unknown
    when they ended, and where machines were announced to go.
    """
    died = [f for f in failures if f.kind is FailureKind.DIED and f.worker is not None and not f.is_preemption]
    hosts = {f.worker.number for f in died if f.worker and f.worker.is_host}
    devices = _in_order([f for f in died if f.worker and not f.worker.is_host and f.ended_unix_s is not None])
    apart = [f for f in devices if f.worker and f.worker.number not in hosts]
    return apart if hosts else apart[1:]


def _in_order(failures: Sequence[Failure]) -> list[Failure]:
    """Failures in the order in which processes ended, or in which the driver learnt of them where that is unknown."""
    return sorted(failures, key=lambda failure: failure.ended_unix_s or math.inf)


def listed(workers: Sequence[Worker | None]) -> str:
    """Workers in few words: `host 1`, or `hosts 0-3, 7 and device 2`; `the cluster` for None."""
    numbers: dict[str, list[int]] = {}
    for worker in workers:
        if worker is None:
            return "the cluster"
        numbers.setdefault(worker.kind, []).append(worker.number)
    parts = [f"{kind}{'s' if len(set(found)) > 1 else ''} {_ranges(found)}" for kind, found in numbers.items()]
    return " and ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


_VERB = {
    FailureKind.DIED: "died",
    FailureKind.HUNG: "hung",
    FailureKind.ERROR: "failed",
    FailureKind.PEER: "lost a peer",
    FailureKind.DAMAGED: "had wrong rows",
}


def roots(failures: Sequence[Failure]) -> list[Failure]:
    """The failures that caused the others. When a member of the gang is gone, JAX aborts the rest. Of several device
    processes that died, only the first may therefore be a root. Host processes die for reasons of their own.
    """
    lost = [failure for failure in failures if failure.kind in (FailureKind.DIED, FailureKind.HUNG)]
    hosts = [failure for failure in lost if failure.worker and failure.worker.is_host]
    by_kind = [[f for f in failures if f.kind is kind] for kind in (FailureKind.DAMAGED, FailureKind.PEER)]
    return hosts or _in_order(lost)[:1] or by_kind[0] or by_kind[1]


def is_host_fault(failures: Sequence[Failure]) -> bool:
    """Whether new processes may help. An exception beside a dead, hung or lost process is its echo (a collective that
    lost a member). A worker that raises survives and keeps its connections. Its own exception therefore makes no other
    worker report a lost peer.
    """
    return any(failure.kind is not FailureKind.ERROR for failure in failures)
