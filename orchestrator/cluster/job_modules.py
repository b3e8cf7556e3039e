"""Whether the machines of a cluster that others started have the modules of a job. Asked before anything is started
there: a host that misses one says so only when its process is up.

Machines that share the driver's address are not asked, and neither are those that join later.
"""

from __future__ import annotations

import io
import sys
from types import FunctionType, ModuleType
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.job.reference import AnyJob, JobReference
from podembed.workers.search_path import SearchPath, missing_module, missing_modules

ANSWER_S = 20.0  # for a process that Ray starts on each machine; without an answer the hosts find out


def packages_of(job: AnyJob) -> tuple[str, ...]:
    """The packages, and modules outside of packages, that a process must be able to import to receive a job."""
    if isinstance(job, JobReference):
        found = {job.function.partition(":")[0].partition(".")[0]}
    else:
        found = _packages_in(job)
    # Without podembed and Ray there is no process that could look.
    return tuple(sorted(found - {"podembed", "ray", "__main__"} - sys.stdlib_module_names))


def _packages_in(value: Any) -> set[str]:
    from ray import cloudpickle

    found: set[str] = set()

    class Names(cloudpickle.Pickler):  # pyright: ignore[reportPrivateImportUsage, reportUntypedBaseClass]
        """Notes what travels as a name: classes, functions and modules that are not of the driver's script."""

        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            if isinstance(obj, ModuleType):
                found.add(obj.__name__.partition(".")[0])
            elif reduced is NotImplemented and isinstance(obj, type | FunctionType):
                found.add(str(obj.__module__).partition(".")[0])
            return reduced

    Names(io.BytesIO()).dump(value)
    return found


def require_modules(job: AnyJob, path: SearchPath) -> None:
    """Returns when all machines of the cluster that answer have the modules of a job. Takes the time that Ray needs to
    start a process on each of them.

    Args:
      path: where the driver looks for modules.

    Raises:
      ConfigurationError: a machine has not.
    """
    import ray
    import ray.exceptions
    import ray.util
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.util.get_node_ip_address()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] != here]
    packages = packages_of(job) if others else ()
    if not packages:
        return
    look: Any = ray.remote(num_cpus=0, max_retries=0)(missing_modules)
    folder = (job.folder,) if isinstance(job, JobReference) and job.folder else ()
    path = SearchPath(before=path.before, after=(*path.after, *folder))
    asked = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            path, packages
        ): node["NodeManagerAddress"]
        for node in others
    }
    for answer in ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)[0]:
        try:
            missing = ray.get(answer)
        except ray.exceptions.RayError:
            # Such as a machine without podembed, of which its hosts say that.
            continue
        if missing:
            raise ConfigurationError(missing_module(missing[0], where=f"on the machine {asked[answer]}"))
