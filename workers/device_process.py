"""`DeviceProcess`: the life of a host's JAX process, from joining the gang to saving its replica of the dense parameters.

A plain class around `DeviceWorker`, wrapped by an actor on a cluster and run by a thread in one process. One thread works; another one may
be in `write_save` meanwhile, which owns the copy that `begin_save` left for it; `status` and `abort` may be called from a third.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.device import DenseStateError, DeviceWindow, DeviceWorker, join_gang, leave_gang
from workers.handover import HandoverEnd, HandoverError, Invitation
from workers.job import JobConfig, JobReference
from workers.progress import Progress, Tracker
from workers.shards import CheckpointMismatch, DenseFile, read_dense, write_dense
from workers.storage import Store

__all__ = ["DenseReceipt", "DeviceProcess", "DeviceReady", "DeviceSpec", "DeviceWindow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """All that a device process needs to know of a generation.

    Attributes:
      coordinator: `address:port` of the gang's coordinator; unused by a gang of one.
      num_samples: rows of the host's share of a batch.
      invitation: how to reach the host process.
    """

    job: JobConfig | JobReference
    host: int
    num_hosts: int
    coordinator: str
    num_samples: int
    invitation: Invitation
    storage_url: str
    start_timeout_s: float
    step_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReady:
    """A started device process. `compile_s` is what building both steps took."""

    process: int
    platform: str
    num_devices: int
    compile_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseReceipt:
    """The dense replica of one host: its digest, and its files where this host wrote them."""

    digest: str
    files: tuple[DenseFile, ...]


class DeviceProcess:
    """The JAX half of one host."""

    def __init__(self) -> None:
        self._tracker = Tracker()
        self._end: HandoverEnd | None = None
        self._abort_reason: str | None = None
        self._frozen: dict[str, np.ndarray] = {}

    def reserve_coordinator(self, address: str) -> str:
        """A free `address:port` on this machine. Another process may take the port first; forming the gang then fails and is retried."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            listener.bind((address, 0))
            return f"{address}:{listener.getsockname()[1]}"

    def start(self, spec: DeviceSpec) -> DeviceReady:
        """Joins host and gang, initialises the dense parameters, compiles.

        Raises:
          HandoverError: the host process is gone.
          RuntimeError: the gang did not form.
        """
        self._spec = spec
        job = spec.job.resolve() if isinstance(spec.job, JobReference) else spec.job
        with self._tracker.phase("join"):
            self._end = spec.invitation.connect(timeout_s=spec.start_timeout_s)
            join_gang(
                coordinator=spec.coordinator,
                num_processes=spec.num_hosts,
                process=spec.host,
                timeout_s=int(spec.start_timeout_s),
            )
        self._worker = DeviceWorker(job=job, num_samples=spec.num_samples)
        with self._tracker.phase("compile"):
            compile_s = self._worker.build()
        import jax

        device = jax.local_devices()[0]
        return DeviceReady(
            process=os.getpid(), platform=device.platform, num_devices=jax.local_device_count(), compile_s=compile_s
        )

    def restore(self, files: Sequence[DenseFile] | None) -> None:
        """Loads a commit's dense arrays; None keeps the first values.

        Raises:
          StorageError, ChunkDamaged: a file is missing or is not what was committed.
          DenseStateError: the arrays are of another model or optimizer.
        """
        if files is not None:
            with self._tracker.phase("restore"):
                self._worker.load_dense_arrays(read_dense(Store(self._spec.storage_url), files))

    def warm_start(self, location: str, files: Sequence[DenseFile], parts: Sequence[str]) -> None:
        """Loads what a new run takes over of another run's dense state.

        Args:
          location: folder of the run whose files are read.
          files: every leaf of the parts that are loaded.
          parts: "params", "optimizer", both or none; the others keep their first values.

        Raises:
          StorageError, ChunkDamaged: a file is missing or is not what was committed.
          CheckpointMismatch: the arrays are of another model or optimizer.
        """
        with self._tracker.phase("restore"):
            try:
                self._worker.load_dense_arrays(read_dense(Store(location), files), parts=parts)
            except DenseStateError as error:
                raise CheckpointMismatch(
                    f"The dense model of the commit to begin from is not that of the job. {error} To begin without it: the rule "
                    "@dense=reinit, or @dense=params where only the dense optimizer changed."
                ) from error

    def serve_window(self) -> DeviceWindow:
        """Works for the host until its window ends.

        Raises:
          HandoverError: the host process is gone or silent.
        """
        if self._end is None:
            raise RuntimeError("The device process has no host. Expected start first.")
        with self._tracker.phase("serve"):
            return self._worker.serve_window(
                self._end, timeout_s=self._spec.step_timeout_s, keep_waiting=self._raise_if_aborted
            )

    def begin_save(self) -> None:
        """Copies the dense arrays: the next step gives their memory away."""
        with self._tracker.phase("copy for save"):
            self._frozen = {key: values.copy() for key, values in self._worker.dense_arrays().items()}

    def write_save(self, attempt: str, is_writer: bool) -> DenseReceipt:
        """Writes the arrays of `begin_save` below `data/<attempt>` if this is the writer; all replicas answer with their digest.

        From a thread of its own, while another trains.

        Raises:
          StorageError: the storage failed or held such files already.
        """
        arrays, self._frozen = self._frozen, {}
        files = write_dense(Store(self._spec.storage_url), attempt, arrays) if is_writer else ()
        self._tracker.mark_saved()
        return DenseReceipt(digest=_digest(arrays), files=files)

    def status(self) -> Progress:
        """Where the working thread is. From any thread."""
        return self._tracker.progress()

    def abort(self, reason: str) -> None:
        """Ends a wait for the host within 100 ms. From any thread."""
        self._abort_reason = reason

    def close(self) -> None:
        """Leaves host and gang. All members of a gang must leave within its deadline."""
        if self._end is not None:
            self._end.close()
            self._end = None
            leave_gang()

    def _raise_if_aborted(self) -> None:
        if self._abort_reason is not None:
            raise HandoverError(f"The driver ended this generation: {self._abort_reason}.")


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        digest.update(f"{key} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
