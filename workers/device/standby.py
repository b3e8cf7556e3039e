"""What a process does while it stands by for one that may be lost: imports, kernels, and a first run of everything.

A standby holds no rows and no socket, and it sleeps. A device process has traced the job's steps once, on the
processor. It has let go of the backend again, since a process with a backend can join no gang. What it keeps is what
Python and JAX set up on the way, most of the time that a new process needs to trace. The programs themselves lie in the
cache of the machine.
"""

from __future__ import annotations

import gc

from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import AnyJob, JobReference


def prepare_host(job: AnyJob, table_buckets: tuple[int, ...]) -> None:
    """Imports the job's modules and loads the kernels of its tables from their cache."""
    from podembed.embedding.lookup.compiled import compile_kernels
    from podembed.workers.job.tables import table_specs

    resolved = job.resolve() if isinstance(job, JobReference) else job
    compile_kernels(table_specs(resolved, table_buckets))


def prepare_device(job: AnyJob) -> None:
    """Imports the job's modules and rehearses."""
    warm_up(job.resolve() if isinstance(job, JobReference) else job)


def warm_up(job: JobConfig) -> None:
    """Traces the steps of a job on the processor and forgets them. Afterwards this process may still join a gang.

    Raises:
      DenseStateError: as `DeviceWorker.build`.
    """
    import jax
    import jax.experimental.multihost_utils
    from jax.extend import backend

    from podembed.workers.device.model_step import DeviceWorker

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.config.update("jax_platforms", "cpu")
    try:
        DeviceWorker(job=job, num_samples=job.batch_size * jax.local_device_count()).build(
            is_restored_later=True, is_rehearsal=True
        )
    finally:
        backend.clear_backends()
        jax.config.update("jax_platforms", platforms)
        gc.collect()
