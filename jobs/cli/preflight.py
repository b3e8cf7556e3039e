"""`podembed compile`: whether a job compiles for a TPU slice and fits there, and what bounds it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

EXIT_DOES_NOT_RUN = 1


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile a job's programs with the TPU's compiler, on a machine without a TPU: whether they compile and fit, and
    what bounds them. Trains nothing. Exits with 1 if a program does not compile or fit.
    """

    topology: tuple[str, ...]
    """TPU slices: a kind with a shape or a number, such as v6e:4x4, v6e-16, v5litepod-16, v5p-128 or tpu7x-32."""
    job: str | None = None
    """As for train."""
    data: tuple[str, ...] = ()
    """As for train."""
    set: tuple[str, ...] = ()
    """As for train, such as batch_size=8192."""
    hosts: int | None = None
    """Hosts of a slice. Default: the machines that it is made of."""
    slices: int = 1
    """Slices that train together."""
    devices_per_host: int | None = None
    """As for train."""
    mesh: tuple[str, ...] = ()
    """As for train."""
    sparse_cores: bool = False
    """As for train."""
    all: bool = False
    """Each room that sequences may have, and not only the largest and the smallest."""
    json: bool = False
    """Print one JSON object."""
    dump: str | None = None
    """Folder for the texts of the programs, before and after compiling."""


def compile_job(command: Compile, environ: Mapping[str, str]) -> int:
    """Compiles and prints. Returns the exit code.

    Raises:
      ConfigurationError: there is no such slice, libtpu is missing, or the job is refused.
    """
    from podembed.jobs.cli.data_arguments import plan_arguments
    from podembed.jobs.cli.job_choice import job_reference
    from podembed.jobs.cli.settings import named_by_flags, parse_mesh
    from podembed.orchestrator.api.config import ScalingConfig
    from podembed.tools.preflight.compiling import compile_for
    from podembed.tools.preflight.slices import parse_slice
    from podembed.tools.preflight.text import problems, render
    from podembed.workers.device.options import device_options

    slices = [parse_slice(name, num_hosts=command.hosts) for name in command.topology]
    with named_by_flags():
        scaling = ScalingConfig(devices_per_host=command.devices_per_host, mesh=parse_mesh(command.mesh))
    job_name = command.job or ("criteo" if command.data else "synthetic")
    found = compile_for(
        job_reference(job_name, command.set, plan_arguments(job_name, command.data)),
        slices,
        num_slices=command.slices,
        options=device_options(
            scaling.devices_per_host, scaling.mesh, "auto", sparse_cores=command.sparse_cores, resources=None
        ),
        is_all=command.all,
        dump=command.dump,
        environ=environ,
        notice=lambda text: print(f"compiling {text}", file=sys.stderr, flush=True),
    )
    if command.json:
        print(json.dumps({"job": job_name, "slices": [account.as_json() for account in found]}))
    else:
        print(render(found))
    return EXIT_DOES_NOT_RUN if any(problems(account) for account in found) else 0
