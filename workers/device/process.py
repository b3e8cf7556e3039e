"""`DeviceProcess`: the life of a host's JAX process, from joining the gang to saving its replica of the dense
parameters.

A plain class around `DeviceWorker`, wrapped by an actor on a cluster and run by a thread in one process. One thread
works. Another one may be in `write_save` meanwhile, which owns the copy that `begin_save` left for it. `status` and
`abort` may be called from a third.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.save_pace import SavePace
from podembed.workers.checkpoint.shard import CheckpointMismatch, read_dense, write_dense
from podembed.workers.device.compile_cache import every_member_writes, use_compile_cache
from podembed.workers.device.dense_half import OtherPrecision
from podembed.workers.device.doorway import ChannelError
from podembed.workers.device.gang import join_gang, leave_gang, make_cpu_devices
from podembed.workers.device.measures.jax_profile import JaxProfile
from podembed.workers.device.model_step import DenseStateError, DeviceOptions, DeviceWindow, DeviceWorker
from podembed.workers.device.shared_memory import ChannelEnd, Invitation
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.faults.plan import FaultPlan
from podembed.workers.faults.storage import with_faults
from podembed.workers.job.reference import AnyJob, JobReference
from podembed.workers.liveness.progress import Phase, Progress, Recorded, Stopwatch, Tracker
from podembed.workers.liveness.worker import Worker
from podembed.workers.storage.store import Store
from podembed.workers.thread_pool import ThreadPool

_LOOK_S = 0.1
# Most leaves are small: what making and syncing the two files of one costs, as bytes that take as long to write.
_FILES_AS_BYTES = 512 << 10

__all__ = ["DenseReceipt", "DeviceProcess", "DeviceReady", "DeviceSpec", "DeviceWindow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """All that a device process needs to know of a generation.

    Attributes:
      coordinator: `address:port` of the gang's coordinator; unused by a gang of one.
      num_samples: rows of the host's share of a batch, with padding.
      shares: rows of every host that are samples.
      invitation: how to reach the host process.
      lease_timeout_s: without calls and heartbeats of the driver for so long, the process ends itself.
      fault_plan: faults to be injected.
      compile_cache: folder of compiled programs on this machine, unless JAX is told of one; empty for none.
      is_restored_later: `restore` of a commit follows, which gives all dense arrays their values.
      platform: platform of the devices, as JAX calls it; empty for any.
      threads: threads that copy results to the host. Those of a CPU device are the environment's business.
      devices: which ones, and how arrays get there.
      table_buckets: per table, the number of buckets.
    """

    job: AnyJob
    host: int
    num_hosts: int
    coordinator: str
    num_samples: int
    invitation: Invitation
    storage_url: str
    start_timeout_s: float
    step_timeout_s: float
    shares: tuple[int, ...] = ()
    lease_timeout_s: float = 30.0
    fault_plan: FaultPlan | None = None
    compile_cache: str = ""
    is_restored_later: bool = False
    platform: str = ""
    threads: int = 1
    devices: DeviceOptions = DeviceOptions()  # noqa: RUF009  # frozen
    table_buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReady:
    """A started device process.

    Attributes:
      compile_s: what building both steps took.
      kind: what JAX calls its devices, such as `NVIDIA H200`.
      mesh: how they are laid out, such as `data=2,model=2`; empty where samples are spread over all of them.
      start_s: seconds of the parts of its start.
    """

    process: int
    platform: str
    num_devices: int
    compile_s: float
    kind: str = ""
    mesh: str = ""
    start_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseReceipt:
    """The dense replica of one host: its digest, and its files where this host wrote them. Also a parameter that is not
    finite any more, if there is one.
    """

    digest: str
    files: tuple[DenseFile, ...]
    spoilt: str | None = None


class DeviceProcess:
    """The JAX half of one host."""

    def __init__(self) -> None:
        self._tracker = Tracker()
        self._profile = JaxProfile(self._tracker.trace)
        self._end: ChannelEnd | None = None
        self._abort_reason: str | None = None
        self._frozen: dict[str, np.ndarray] = {}
        self._is_frozen = threading.Event()
        self._never_finite: frozenset[str] = frozenset()
        self._pace = SavePace(self._tracker, longest_grace_s=0.0)
        self._thread_pool = ThreadPool(1)

    def reserve_coordinator(self, address: str) -> str:
        """A free `address:port` on this machine. Another process may take the port first; joining the gang then fails
        and is retried.
        """
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            listener.bind((address, 0))
            return f"{address}:{listener.getsockname()[1]}"

    def start(self, spec: DeviceSpec) -> DeviceReady:
        """Joins host and gang, initialises the dense parameters, compiles.

        Raises:
          ChannelError: the host process is gone.
          RuntimeError: the gang did not form.
        """
        self._spec = spec
        self._tracker.faults = faults = FaultPoints.of(spec.fault_plan, str(Worker("device", spec.host)))
        self._tracker.point("start.begin")
        stopwatch = Stopwatch()
        use_compile_cache(spec.compile_cache)
        make_cpu_devices(spec.devices)
        with self._tracker.phase(Phase.JOIN):
            self._end = spec.invitation.connect(timeout_s=spec.start_timeout_s)
            # Records of stored runs call it so.
            stopwatch.end("handover")
            join_gang(
                coordinator=spec.coordinator,
                num_processes=spec.num_hosts,
                process=spec.host,
                timeout_s=int(spec.start_timeout_s),
                platform=spec.platform,
            )
            stopwatch.end("gang")
        # Not before: a job may make an array of JAX where it is declared, and a process that has one joins no gang.
        job = spec.job.resolve() if isinstance(spec.job, JobReference) else spec.job
        stopwatch.end("job")
        self._thread_pool = ThreadPool(spec.threads)
        self._worker = DeviceWorker(
            job=job,
            num_samples=spec.num_samples,
            shares=spec.shares,
            options=spec.devices,
            table_buckets=spec.table_buckets,
            faults=faults,
            thread_pool=self._thread_pool,
            compiling=self._compiling,
            trace=self._tracker.trace,
        )
        with self._compiling():
            compile_s = self._worker.build(is_restored_later=spec.is_restored_later)
        if not spec.is_restored_later:
            self._note_never_finite()
        import jax

        self._end.say_num_devices(self._worker.mesh.num_parts)
        self._tracker.point("start.ready")

        device = jax.local_devices()[0]
        return DeviceReady(
            process=os.getpid(),
            platform=device.platform,
            num_devices=self._worker.mesh.num_local,
            mesh=self._worker.mesh.text,
            compile_s=compile_s,
            start_s=stopwatch.seconds | self._worker.build_s,
            kind=device.device_kind,
        )

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        with self._tracker.phase(Phase.COMPILE), every_member_writes():
            yield

    def restore(self, files: Sequence[DenseFile] | None) -> None:
        """Loads a commit's dense arrays; None keeps the first values.

        Raises:
          StorageError, ChunkDamaged: a file is missing or is not what was committed.
          CheckpointMismatch: the arrays are of another model or optimizer.
        """
        if files is not None:
            with self._tracker.phase(Phase.RESTORE):
                try:
                    self._worker.load_dense_arrays(read_dense(self._store, files))
                except OtherPrecision as error:
                    raise CheckpointMismatch(str(error)) from error
                except DenseStateError as error:
                    raise CheckpointMismatch(
                        f"The dense model of the run is not that of the job. {error} Resume with the model and the "
                        "dense optimizer of the run. Or begin a new run from it: podembed train --warm-start RUN "
                        "--warm-start-rules @dense=reinit."
                    ) from error
            self._note_never_finite()

    def _note_never_finite(self) -> None:
        """A model may declare a constant such as a mask of infinities among its parameters. A commit holds no others
        that are not finite.
        """
        self._never_finite = frozenset(_not_finite(self._worker.dense_arrays()))

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
        with self._tracker.phase(Phase.RESTORE):
            try:
                self._worker.load_dense_arrays(read_dense(Store(location), files), parts=parts)
            except OtherPrecision as error:
                raise CheckpointMismatch(str(error)) from error
            except DenseStateError as error:
                raise CheckpointMismatch(
                    f"The dense model of the commit to begin from is not that of the job. {error} To begin without it: "
                    "the rule @dense=reinit, or @dense=params where only the dense optimizer changed."
                ) from error

    def serve_window(self) -> DeviceWindow:
        """Works for the host until its window ends.

        Raises:
          ChannelError: the host process is gone or silent.
        """
        if self._end is None:
            raise RuntimeError("The device process has no host. Expected start first.")
        with self._tracker.phase(Phase.SERVE):
            return self._worker.serve_window(
                self._end, timeout_s=self._spec.step_timeout_s, keep_waiting=self._raise_if_aborted
            )

    def begin_save(self) -> None:
        """Copies the dense arrays: the next step gives their memory away. Gives the host the rows of its tables that
        live on devices.

        Raises:
          ChannelError: the host process is gone or silent.
        """
        with self._tracker.phase(Phase.COPY_FOR_SAVE):
            self._frozen = {key: values.copy() for key, values in self._worker.dense_arrays().items()}
            if self._end is not None:
                self._worker.give_tables(
                    self._end, timeout_s=self._spec.step_timeout_s, keep_waiting=self._raise_if_aborted
                )
        self._is_frozen.set()

    def write_save(self, attempt: str, is_writer: bool) -> DenseReceipt:
        """Writes the arrays of `begin_save` below `data/<attempt>` if this is the writer; all replicas answer with
        their digest.

        From a thread of its own, while another trains.

        Raises:
          StorageError: the storage failed or held such files already.
        """
        deadline_s = time.monotonic() + self._spec.step_timeout_s
        while not self._is_frozen.wait(_LOOK_S):
            self._raise_if_aborted()
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    "A save was to be written and nothing was copied for it. Expected begin_save with it."
                )
        self._is_frozen.clear()
        arrays, self._frozen = self._frozen, {}
        # An update may spoil the parameters although the loss before it was finite; the next loss would tell, but comes
        # too late.
        spoilt = next((key for key in _not_finite(arrays) if key not in self._never_finite), None)
        if spoilt is not None:
            return DenseReceipt(digest=_digest(arrays), files=(), spoilt=spoilt)
        self._pace.begin()
        with self._tracker.trace.span("save", f"write {attempt}" if is_writer else f"digest of {attempt}"):
            each = self._leave_room_for_files
            files = write_dense(self._store, attempt, arrays, before_each=each) if is_writer else ()
            digest = _digest(arrays, before_each=self._leave_room)
        self._tracker.mark_saved()
        return DenseReceipt(digest=digest, files=files)

    def _leave_room(self, values: np.ndarray) -> None:
        """Training beside the save comes first."""
        self._pace.keep_to(values.nbytes, is_urgent=self._is_urgent)

    def _leave_room_for_files(self, values: np.ndarray) -> None:
        self._pace.keep_to(values.nbytes + _FILES_AS_BYTES, is_urgent=self._is_urgent)

    def _is_urgent(self) -> bool:
        self._raise_if_aborted()
        return False

    @property
    def _store(self) -> Store:
        return with_faults(Store(self._spec.storage_url), self._tracker.faults)

    def status(self) -> Progress:
        """The phase of the working thread, and whether it waits for its host. From any thread."""
        progress, end = self._tracker.progress(), self._end
        if end is None or not end.is_waiting:
            return progress
        return replace(progress, phase=Phase.WAIT_FOR_HOST, waits_for=(Worker("host", self._spec.host),))

    def trace_clock_s(self) -> float:
        """The clock of a trace. From any thread."""
        return self._tracker.trace.now_s()

    def begin_trace(self, with_jax: bool) -> None:
        """Records from now on what this process does, with JAX's own profile if asked. From any thread."""
        if with_jax:
            self._profile.begin()
        self._tracker.trace.begin()

    def end_trace(self) -> Recorded:
        """The recorded spans. From any thread."""
        recorded = self._tracker.trace.end()
        spans, num_dropped, reason = self._profile.end()
        return replace(
            recorded,
            spans=(*recorded.spans, *spans),
            num_dropped=recorded.num_dropped + num_dropped,
            without_jax=reason,
        )

    def abort(self, reason: str) -> None:
        """Ends a wait for the host within 100 ms. From any thread."""
        self._abort_reason = reason

    def close(self) -> None:
        """Leaves host and gang. All members of a gang must leave within its deadline."""
        self._thread_pool.close()
        if self._end is not None:
            self._end.close()
            self._end = None
            leave_gang()

    def _raise_if_aborted(self) -> None:
        if self._abort_reason is not None:
            raise ChannelError(f"The driver ended this generation: {self._abort_reason}.")


def _not_finite(arrays: dict[str, np.ndarray]) -> list[str]:
    """Keys of parameters with a value that is infinite or no number. An optimizer's state may hold such on purpose."""
    params = {key: values for key, values in arrays.items() if key.split("/", 1)[0] == "params"}
    # Types that numpy does not know by itself, such as bfloat16, have the kind V.
    wide = {key: values.astype(np.float32) if values.dtype.kind == "V" else values for key, values in params.items()}
    return [key for key, values in wide.items() if values.dtype.kind in "fc" and not np.isfinite(values).all()]


def _digest(arrays: dict[str, np.ndarray], before_each: Callable[[np.ndarray], None] = lambda values: None) -> str:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        before_each(arrays[key])
        array = np.ascontiguousarray(arrays[key])
        digest.update(f"{key} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
