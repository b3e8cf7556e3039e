"""Ray: the cluster of a run, and the backend that runs worker processes as actors on it.

With an address (`RAY_ADDRESS`, as inside a Ray job) the program joins that cluster; otherwise it starts one of its own on this machine,
with token authentication and a folder that goes when the program ends. Ray's own daemons listen on the machine's address; meshes and JAX
gangs of hosts that share a machine listen on the loopback interface.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.config import ConfigurationError, ScalingConfig
from orchestrator.errors import Failure, FailureKind
from orchestrator.worker_group import Call, HostHandles
from workers.progress import machine_identity

LOOPBACK = "127.0.0.1"
PLACEMENT_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 15.0
FOLDER_PREFIX = "podembed-ray-"
OBJECT_STORE_BYTES = 200 << 20  # control messages only; no step's data passes through Ray


@contextlib.contextmanager
def connected(num_hosts: int) -> Iterator[None]:
    """Joins or starts a cluster for the length of the block, unless the process is connected already."""
    # Read by Ray when it is imported; a program that imported it before chose its own settings.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray prints a page of general advice when a worker dies; the driver says what happened itself.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
    address = os.environ.get("RAY_ADDRESS")
    if address is None and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if os.environ["RAY_AUTH_MODE"] == "token":
            # Set, so that Ray does not write a token of its own into the home folder.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    if ray.is_initialized():
        yield
        return
    with contextlib.ExitStack() as stack:
        if address is not None:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        else:
            _sweep_folders()
            folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-")
            stack.callback(_remove, folder)
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, 2 * num_hosts),
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=LOOPBACK,
                _temp_dir=folder,
            )
        stack.callback(ray.shutdown)
        yield


def _sweep_folders() -> None:
    """Removes what clusters of killed programs left: their folders carry the program's process id."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        process = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: str) -> None:
    """Removes the folder of a cluster that has been shut down; a daemon on its way out may write into it once more."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    shutil.rmtree(folder, ignore_errors=True)
    while time.monotonic() < deadline:
        time.sleep(0.3)
        if not os.path.exists(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, eq=False)
class RayCall:
    """A method call of an actor under way."""

    worker: str
    reference: Any
    handle: RayHandle


class RayHandle:
    """One actor."""

    def __init__(self, worker: str, actor: Any, bind_address: str = "") -> None:
        self.worker = worker
        self.actor = actor
        self._bind_address = bind_address

    @property
    def where(self) -> str:
        return f"actor {self.actor._actor_id.hex()[:12]}"

    def call(self, method: str, *arguments: Any) -> Call:
        if method == "start" and self.worker.startswith("host"):
            spec, *rest = arguments
            bound = replace(spec, bind_address=self._bind_address)
            return RayCall(self.worker, self.actor.start.remote(bound, *rest), self)
        return RayCall(self.worker, self.actor.run.remote(method, *arguments), self)

    def background(self, method: str, *arguments: Any) -> Call:
        return RayCall(self.worker, self.actor.run_in_background.remote(method, *arguments), self)

    def control(self, method: str, *arguments: Any) -> Call:
        return RayCall(self.worker, getattr(self.actor, method).remote(*arguments), self)


class RayBackend:
    """Hosts as pairs of actors, one placement group bundle a host.

    Args:
      scaling: resources and threads of a host.
      notice: told once about facts that a user should know, such as hosts that share a machine.
      actors: classes of a host's two actors; None for those of a run.
    """

    def __init__(self, scaling: ScalingConfig, notice: Any, actors: tuple[Any, Any] | None = None) -> None:
        self._scaling = scaling
        self._notice = notice
        self._actors = actors
        self._groups: dict[int, Any] = {}
        self._identities: dict[Any, Any] = {}

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        import ray
        from ray.util.placement_group import placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from workers.actor import DeviceActor, HostActor

        host_class, device_class = self._actors or (HostActor, DeviceActor)
        bundle = self._bundle(num_hosts)
        group = placement_group([bundle] * num_hosts, strategy=self._strategy(num_hosts))
        try:
            self._await_placement(group, num_hosts, bundle, on_wait)
        except BaseException:
            ray.util.remove_placement_group(group)
            raise
        # Hosts that share one machine have no reason to be heard outside it; otherwise each binds to its machine's address.
        machines = set(placement_group_table(group)["bundles_to_node_id"].values())
        bind_address = LOOPBACK if len(machines) == 1 else ""
        handles = []
        for host in range(num_hosts):
            place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=host)
            half = bundle.get("CPU", 0.0) / 2
            accelerators = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
            options: dict[str, Any] = {"scheduling_strategy": place, "num_cpus": half}
            environment = {"env_vars": _worker_variables(self._scaling.threads_per_host)}
            host_actor = host_class.options(**options, runtime_env=environment).remote()
            device_actor = device_class.options(
                **options, num_gpus=bundle.get("GPU", 0), resources=accelerators, runtime_env=environment
            ).remote()
            for actor in (host_actor, device_actor):
                self._identities[actor._actor_id] = actor.identity.remote()
            handles.append(
                HostHandles(
                    RayHandle(f"host {host}", host_actor, bind_address), RayHandle(f"device {host}", device_actor)
                )
            )
        self._groups[id(handles)] = group
        return handles

    def _await_placement(
        self, group: Any, num_hosts: int, bundle: dict[str, float], on_wait: Callable[[], None]
    ) -> None:
        """Waits until the cluster has room for all hosts.

        Raises:
          ConfigurationError: it has none within the deadline.
        """
        import ray

        deadline = time.monotonic() + PLACEMENT_TIMEOUT_S
        ready = group.ready()
        while not ray.wait([ready], timeout=0.2)[0]:
            on_wait()
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"The cluster did not give {num_hosts} hosts {bundle} each within {PLACEMENT_TIMEOUT_S:.0f} s; it offers "
                    f"{ray.available_resources()}. Add nodes, lower num_hosts, or lower resources_per_host."
                )
        ray.get(ready)

    def _bundle(self, num_hosts: int) -> dict[str, float]:
        import ray

        if self._scaling.resources_per_host is not None:
            return dict(self._scaling.resources_per_host)
        total = ray.cluster_resources().get("CPU", 0.0)
        # Rounded down to what Ray can count; both processes of a host take half.
        share = min(1.0, int(total / num_hosts * 1000) / 1000)
        if share <= 0:
            raise ConfigurationError(f"The cluster has {total} CPUs for {num_hosts} hosts. Expected some. Start nodes.")
        return {"CPU": share}

    def _strategy(self, num_hosts: int) -> str:
        import ray

        machines = len([node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")])
        if machines >= num_hosts:
            return "STRICT_SPREAD"
        self._notice(f"{num_hosts} hosts share {machines} machine{'s' if machines > 1 else ''}")
        return "SPREAD"

    def settled(self, calls: Sequence[Call], *, timeout_s: float) -> tuple[list[Call], list[Call]]:
        import ray

        by_reference = {call.reference: call for call in calls}  # type: ignore[attr-defined]
        ended, running = ray.wait(list(by_reference), num_returns=len(by_reference), timeout=0)
        if not ended and timeout_s > 0:
            ended, running = ray.wait(running, num_returns=1, timeout=timeout_s)
        return [by_reference[r] for r in ended], [by_reference[r] for r in running]

    def result(self, call: Call) -> Any | Failure:
        import ray
        import ray.exceptions

        try:
            return ray.get(call.reference)  # type: ignore[attr-defined]
        except ray.exceptions.ActorDiedError as error:
            return Failure(worker=call.worker, kind=FailureKind.DIED, message=_death(str(error)))
        except ray.exceptions.RayTaskError as error:
            source = error.cause if isinstance(error.cause, BaseException) else error
            return failure_of(call.worker, source, details=str(error))
        except ray.exceptions.RayError as error:
            return Failure(worker=call.worker, kind=FailureKind.DIED, message=_first_line(str(error)))

    def stop(self, handles: Sequence[HostHandles]) -> None:
        import ray

        actors = [handle.actor for pair in handles for handle in (pair.host, pair.device)]  # type: ignore[attr-defined]
        processes = self._local_processes(actors)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        # A frozen process takes Ray seconds to kill; its memory and its chips are free only when it is gone.
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while any(_is_alive(process) for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        group = self._groups.pop(id(handles), None)
        if group is not None:
            ray.util.remove_placement_group(group)

    def _local_processes(self, actors: Sequence[Any]) -> list[int]:
        """Process ids of those actors that run on this machine, as far as they have come up."""
        import ray
        import ray.exceptions

        known = [self._identities[actor._actor_id] for actor in actors if actor._actor_id in self._identities]
        ended, _ = ray.wait(known, num_returns=len(known), timeout=0) if known else ([], [])
        found = []
        for reference in ended:
            with contextlib.suppress(ray.exceptions.RayError):
                machine, process = ray.get(reference)
                if machine == machine_identity():
                    found.append(process)
        return found


def _is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def failure_of(worker: str, error: BaseException, *, details: str = "") -> Failure:
    """An exception of a worker as a failure: those that only report another process are told apart by type."""
    from workers.handover import HandoverError
    from workers.input_errors import InputError
    from workers.job import JobError
    from workers.mesh_errors import MeshError
    from workers.shards import CheckpointMismatch
    from workers.storage_errors import StorageError

    is_peer = isinstance(error, MeshError | HandoverError) or _is_broken_collective(error)
    kind = FailureKind.PEER if is_peer else FailureKind.ERROR
    return Failure(
        worker=worker,
        kind=kind,
        message=f"{type(error).__name__}: {_first_line(str(error))}",
        details=details,
        is_refusal=isinstance(error, StorageError | InputError | CheckpointMismatch | JobError),
    )


def _is_broken_collective(error: BaseException) -> bool:
    """Whether JAX reports a member of the gang that is gone; it has one type for everything, so the words decide."""
    is_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return is_jax and any(word in str(error) for word in _COLLECTIVE_WORDS)


_COLLECTIVE_WORDS = (
    "Gloo",
    "gloo",
    "coordination service",
    "Connection reset",
    "Connection closed",
    "UNAVAILABLE",
    "heartbeat",
)


# glibc's allocator gives large blocks back to the kernel and asks for them again in every step, a page fault for each 4 KiB; told to keep
# them, in huge pages where there are any, a CPU device spends a fifth less time in a step.
MALLOC_TUNABLES = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_max=0",
        "glibc.malloc.trim_threshold=17179869184",
        "glibc.malloc.top_pad=67108864",
        "glibc.malloc.arena_max=1",
    )
)


def _worker_variables(threads: int | None) -> dict[str, str]:
    """Environment of a worker process; what the user set for the allocator is left alone."""
    allocator = {} if "GLIBC_TUNABLES" in os.environ else {"GLIBC_TUNABLES": MALLOC_TUNABLES}
    return allocator | _thread_variables(threads)


def _thread_variables(threads: int | None) -> dict[str, str]:
    """Environment that keeps a host's kernels and its CPU device to so many threads."""
    if threads is None:
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'}"
    return {
        "NUMBA_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "XLA_FLAGS": f"{flags} intra_op_parallelism_threads={threads}".strip(),
    }


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def _death(text: str) -> str:
    """The part of Ray's message that says how the process ended."""
    for line in text.splitlines():
        if "exit detail" in line or "exit type" in line:
            detail = line.split("exit detail:")[-1].strip()
            return detail.split(" Some common causes")[0][:200]
    return _first_line(text)
