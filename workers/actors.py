"""The Ray actors: `HostWorker` and `DeviceProcess` with a control side that answers while they work. Nothing else of a
host knows Ray.

The `control` group has a thread of its own, and so has `background`, which writes checkpoints while training goes on.
Actors are never restarted by Ray and calls never retried: a restarted actor would answer with empty tables and no
error.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import cloudpickle

from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.reference import AnyJob, JobReference
from podembed.workers.liveness.carried_error import carried
from podembed.workers.liveness.lease_watch import LeaseTerms, LeaseWatch, StoredLease
from podembed.workers.liveness.memory import oom_kills
from podembed.workers.liveness.progress import machine_identity
from podembed.workers.processors import OWN_CLUSTER, keep_process_to, keep_thread_to, processors_of, roam
from podembed.workers.search_path import SearchPath, search_as


def _leave_signals_to_the_driver() -> None:
    """Ctrl-C reaches every process of a terminal; only the driver decides what it means."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


# What only one of the two processes needs is imported there: the other one starts a tenth earlier without it.
def _host_worker() -> Any:
    from podembed.workers.host.host import HostWorker

    return HostWorker()


def _device_process() -> Any:
    # Imported here, so that the environment of the actor is complete before JAX reads it.
    from podembed.workers.device.process import DeviceProcess

    return DeviceProcess()


# What a process does while it stands by for one that may be lost. A standby holds no rows and no socket, and it sleeps.
# A device process has traced the job's steps once, on the processor. It has let go of the backend again, since a
# process with a backend can join no gang. What it keeps is what Python and JAX set up on the way, most of the time that
# a new process needs to trace. The programs themselves lie in the cache of the machine.


def prepare_host(job: AnyJob, table_buckets: tuple[int, ...]) -> None:
    """Imports the job's modules and loads the kernels of its tables from their cache."""
    from podembed.embedding.lookup.compiled import compile_kernels
    from podembed.workers.job.tables import has_weighted_ids, table_specs

    resolved = job.resolve() if isinstance(job, JobReference) else job
    compile_kernels(table_specs(resolved, table_buckets), has_weights=has_weighted_ids(resolved))


def prepare_device(job: AnyJob, table_buckets: tuple[int, ...]) -> None:
    """Imports the job's modules and rehearses. JAX is imported by now."""
    warm_up(job.resolve() if isinstance(job, JobReference) else job)


def warm_up(job: JobConfig) -> None:
    """Traces the steps of a job on the processor and forgets them. Afterwards this process may still join a gang.

    Raises:
      DenseStateError: as `DeviceWorker.build`.
      JobError: the job holds arrays of JAX, which would not outlive the rehearsal.
    """
    import jax
    import jax.experimental.multihost_utils
    from jax.extend import backend

    from podembed.workers.device.model_step import DeviceWorker

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.config.update("jax_platforms", "cpu")
    try:
        if jax.live_arrays():
            raise JobError("Found arrays of JAX in the job. Expected none. Make them with numpy, or in the model.")
        DeviceWorker(job=job, num_samples=job.batch_size * jax.local_device_count()).build(
            is_restored_later=True, is_rehearsal=True
        )
    finally:
        backend.clear_backends()
        jax.config.update("jax_platforms", platforms)
        gc.collect()


def _processors_for(spec: Any) -> frozenset[int]:
    """Processors of a host or device process by its spec. Only in a cluster of the program's own, all hosts are on one
    machine.
    """
    host, num_hosts = (spec.host, spec.num_hosts) if OWN_CLUSTER in os.environ else (0, 1)
    return processors_of(host, num_hosts, threads=spec.threads)


def _copied(value: Any) -> Any:
    """As Ray copies it into another process."""
    return cloudpickle.loads(cloudpickle.dumps(value))  # type: ignore[attr-defined]


# Ray sends an argument of up to 100 KB within the call. A larger one goes through its object store, which costs several
# milliseconds of processor time however large it is. Beyond the second number, pieces cost more than that.
_PIECE_BYTES = 96 << 10
_MAX_BYTES_IN_PIECES = 800 << 10
_ALIGNMENT_BYTES = 16


def in_pieces(arguments: Sequence[Any]) -> list[Any] | None:
    """Arguments of a call as arguments of `Actor.run_with_pieces`; None where it costs less to pass them as they are.

    Raises:
      TypeError: an argument cannot travel.
    """
    buffers: list[Any] = []
    head = cloudpickle.dumps(list(arguments), protocol=5, buffer_callback=buffers.append)  # type: ignore[attr-defined]
    arrays = [buffer.raw() for buffer in buffers]
    if not _PIECE_BYTES < len(head) + sum(array.nbytes for array in arrays) <= _MAX_BYTES_IN_PIECES:
        return None
    padded = [part for array in arrays for part in (array, bytes(-array.nbytes % _ALIGNMENT_BYTES))]
    content = b"".join([*padded, head])
    pieces = [content[at : at + _PIECE_BYTES] for at in range(0, len(content), _PIECE_BYTES)]
    return [[array.nbytes for array in arrays], *pieces]


def of_pieces(sizes: Sequence[int], *pieces: bytes) -> list[Any]:
    """What `in_pieces` took apart. Arrays cannot be written to, as Ray's."""
    content = memoryview(b"".join(pieces))
    arrays = []
    for size in sizes:
        arrays.append(content[:size])
        content = content[size + -size % _ALIGNMENT_BYTES :]
    return cloudpickle.loads(content, buffers=arrays)  # type: ignore[attr-defined]


class Actor:
    """What all kinds of actor do: work for the driver that is heard, and answer beside it.

    Args:
      new_worker: makes who does the work.
      prepare: makes this process ready for the work of a job with so many buckets a table.
      lease: what a process follows that stands by. It is known from the first moment, since the owner of a call sends
        it only when the process is there: a driver that froze in between would never say it.
      label: what Ray calls this process in its dashboard, in `ray list actors --detail` and before lines of its log.
      path: where the driver looks for modules. It is followed from here on: the calls that bring a job come later.
    """

    def __init__(
        self,
        new_worker: Callable[[], Any],
        prepare: Callable[[AnyJob, tuple[int, ...]], None] = lambda job, table_buckets: None,
        lease: LeaseTerms | None = None,
        *,
        label: str = "",
        path: SearchPath = SearchPath(),  # noqa: B008  # frozen
    ) -> None:
        search_as(path)
        self._label = label
        _leave_signals_to_the_driver()
        self._driver = LeaseWatch()
        if lease is not None:
            self._driver.stand_by(lease)
        self._worker = new_worker()
        self._prepare = prepare

    def __repr__(self) -> str:
        # Ray asks once, when the process is up. Ray's `name` instead would have to be unique, and to give one waits for
        # the cluster's head.
        return self._label or type(self).__name__

    def _watch_over(self, storage_url: str, generation: int, lease_timeout_s: float) -> None:
        """To be called for every generation that this process is part of: it follows the heartbeat of that one."""
        self._driver.heard()
        self._driver.begin(StoredLease(storage_url), generation=generation, timeout_s=lease_timeout_s)

    def prepare(self, job: AnyJob, table_buckets: tuple[int, ...]) -> None:
        """Makes this process ready to take a lost one's place at once."""
        self._driver.heard()
        self._prepare(job, table_buckets)

    def _arrived(self, argument: Any) -> Any:
        """An argument of a call as the worker gets it. The spec of a generation says what to follow from now on."""
        return argument

    def run(self, method: str, *arguments: Any) -> Any:
        """Any working method of the worker."""
        return self._answer(method, [self._arrived(argument) for argument in arguments])

    def run_with_pieces(self, method: str, *pieces: Any) -> Any:
        """The same with arguments that `in_pieces` took apart."""
        return self.run(method, *of_pieces(*pieces))

    def run_shared(self, method: str, own: Mapping[str, Any], shared: Any, *others: Any) -> Any:
        """The same with a first argument that many actors get.

        Args:
          own: fields of it that differ for this one.
        """
        return self.run(method, replace(shared, **own) if own else shared, *others)

    @ray.method(concurrency_group="background")
    def run_in_background(self, method: str, *arguments: Any) -> Any:
        """A method of the worker that may run beside a working one."""
        roam()
        return self._answer(method, arguments)

    @ray.method(concurrency_group="control")
    def run_at_once(self, method: str, *arguments: Any) -> Any:
        """A method of the worker that answers while another one works."""
        return self._answer(method, arguments)

    def _answer(self, method: str, arguments: Sequence[Any]) -> Any:
        self._driver.heard()
        try:
            return getattr(self._worker, method)(*arguments)
        except Exception as error:
            sent = carried(error, _copied)
            if sent is error:
                raise
            raise sent from error

    @ray.method(concurrency_group="control")
    def identity(self) -> tuple[str, int]:
        """Which process this is: machine and process id."""
        return machine_identity(), os.getpid()

    @ray.method(concurrency_group="control")
    def oom_kills(self) -> int:
        """As `workers.liveness.memory.oom_kills`, of the machine that this is on."""
        return oom_kills()

    @ray.method(concurrency_group="control")
    def niceness(self) -> int:
        """The niceness of this process: 0 is usual, and with 19 everybody else goes first."""
        return os.getpriority(os.PRIO_PROCESS, 0)


class _HostActor(Actor):
    """One host: shard, slots, input, storage. Never runs `jax.distributed`."""

    def __init__(self, lease: LeaseTerms | None = None, **named: Any) -> None:
        super().__init__(_host_worker, prepare_host, lease, **named)

    def _arrived(self, argument: Any) -> Any:
        """A spec gets the address by which the cluster knows this machine."""
        from podembed.workers.host.spec import HostSpec

        if not isinstance(argument, HostSpec):
            return argument
        self._watch_over(argument.storage_url, argument.generation, argument.lease_timeout_s)
        # Not before that: the thread that watches is one that this one starts.
        keep_thread_to(_processors_for(argument))
        return replace(argument, bind_address=argument.bind_address or ray.util.get_node_ip_address())


class _DeviceActor(Actor):
    """One host's member of the JAX gang."""

    def __init__(self, lease: LeaseTerms | None = None, **named: Any) -> None:
        super().__init__(_device_process, prepare_device, lease, **named)
        self._own: frozenset[int] | None = None

    def run(self, method: str, *arguments: Any) -> Any:
        answer = super().run(method, *arguments)
        # Not before it has started: JAX makes as many threads as there are processors, and compiles on all of them.
        if self._own is not None:
            keep_process_to(self._own)
            self._own = None
        return answer

    def _arrived(self, argument: Any) -> Any:
        from podembed.workers.device.process import DeviceSpec

        if isinstance(argument, DeviceSpec):
            self._own = _processors_for(argument)
            self._watch_over(argument.storage_url, argument.invitation.generation, argument.lease_timeout_s)
        return argument


# Ray's annotations do not know the options of `remote` in this form.
_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"control": 1, "background": 1},
}
HostActor: Any = ray.remote(**_OPTIONS)(_HostActor)
DeviceActor: Any = ray.remote(**_OPTIONS)(_DeviceActor)
