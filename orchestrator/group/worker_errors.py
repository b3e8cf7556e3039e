"""What a worker's exception says: whether it is the cause of a failure or only reports another process, and whether it
may pass.

Types decide where there are some; of JAX, which has one type for everything, and of Ray's reports of a death, the
words.
"""

from __future__ import annotations

import re

from podembed.orchestrator.api.run_errors import (
    DataRefused,
    Failure,
    FailureKind,
    JobRefused,
    StorageRefused,
    WorkerRefused,
)
from podembed.workers.liveness.carried_error import plain_text, words_of
from podembed.workers.liveness.worker import Worker
from podembed.workers.search_path import missing_module


def failure_of(worker: Worker, error: BaseException, *, details: str = "") -> Failure:
    """An exception of a worker as a failure: its type says whether it only reports another process."""
    from podembed.workers.device.doorway import ChannelError
    from podembed.workers.device.gang_errors import DeviceMissing
    from podembed.workers.host.survivors.verification import RowsDamaged
    from podembed.workers.mesh.mesh_errors import MeshConnectTimeout, MeshError
    from podembed.workers.storage.storage_errors import may_pass

    if (module := _module_missed(error)) is not None:
        said = missing_module(module, where=f"on the machine of {worker}")
        return Failure(worker=worker, kind=FailureKind.ERROR, message=said, details=details, refusal=JobRefused)
    if isinstance(error, DeviceMissing):
        # Its process lives, and is of no use to anybody. What helps is another machine.
        return Failure(worker=worker, kind=FailureKind.DIED, message=first_line(words_of(error)))
    is_peer = isinstance(error, MeshError | ChannelError) or _is_broken_collective(error)
    is_damaged = isinstance(error, RowsDamaged)
    kind = FailureKind.PEER if is_peer else FailureKind.DAMAGED if is_damaged else FailureKind.ERROR
    return Failure(
        worker=worker,
        kind=kind,
        message=f"{type(error).__name__}: {first_line(words_of(error))}",
        details=plain_text(details),
        refusal=_refusal(error),
        memory="host" if isinstance(error, MemoryError) else "device" if _is_device_full(error) else "",
        is_storage=not is_peer and may_pass(error),
        unreached=tuple(Worker("host", rank) for rank in error.missing)
        if isinstance(error, MeshConnectTimeout)
        else (),
    )


def _module_missed(error: BaseException) -> str | None:
    """The module that was not there when a call's arguments were unpacked: the worker was never called, and Ray has a
    type of its own for that, with the words of Python.
    """
    found = _NO_MODULE.search(str(error)) if type(error).__name__ == "RaySystemError" else None
    return found[1] if found else None


_NO_MODULE = re.compile(r"No module named '([^']+)'")


def _refusal(error: BaseException) -> type[WorkerRefused] | None:
    """The type that a program catches; None where the error's own text does not say what to mend."""
    from podembed.workers.checkpoint.shard import CheckpointMismatch
    from podembed.workers.data.input_errors import InputError
    from podembed.workers.descriptors import DescriptorsExhausted
    from podembed.workers.device.gang_errors import GangError
    from podembed.workers.job.job import JobError
    from podembed.workers.storage.storage_errors import StorageError

    for kind, refusal in ((InputError, DataRefused), (StorageError, StorageRefused), (JobError, JobRefused)):
        if isinstance(error, kind):
            return refusal
    return WorkerRefused if isinstance(error, CheckpointMismatch | GangError | DescriptorsExhausted) else None


def _is_device_full(error: BaseException) -> bool:
    return _is_jax(error) and "RESOURCE_EXHAUSTED" in str(error)


def _is_jax(error: BaseException) -> bool:
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")


def _is_broken_collective(error: BaseException) -> bool:
    """Whether JAX reports a member of the gang that is gone; it has one type for everything, so the words decide."""
    if not _is_jax(error):
        return False
    text = str(error)
    # NCCL's name for processes that cannot work together, such as two on one GPU; they cannot the next time either.
    return "invalid usage" not in text and any(word in text for word in _COLLECTIVE_WORDS)


_COLLECTIVE_WORDS = (
    "Gloo",
    "gloo",
    "NCCL",
    "coordination service",
    "Connection reset",
    "Connection closed",
    "UNAVAILABLE",
    "heartbeat",
)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def death(text: str) -> str:
    """The part of Ray's message that says how the process ended."""
    for line in text.splitlines():
        if "exit detail" in line or "exit type" in line:
            detail = line.split("exit detail:")[-1].strip()
            return detail.split(" Some common causes")[0][:_LONGEST]
    first = first_line(text)
    if "creation task" not in first:
        return first
    # Ray prints the process, a traceback of its own, and at the end the exception with all lines of its message.
    machine, raised = _MACHINE.search(first), _RAISED.findall(text)
    where = f" on {machine[1]}" if machine else ""
    cause = " ".join(text[text.rindex(raised[-1]) :].split()) if raised else text.split("\n")[-1].strip()
    remedy = " Install it there, in the environment that Ray runs in." if "ModuleNotFoundError" in cause else ""
    return f"it could not start{where}: {cause[:_LONGEST].removesuffix('.')}.{remedy}"


_LONGEST = 200
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b.*$", re.MULTILINE)
_MACHINE = re.compile(r"\bip=([^,)]+)")
