"""`podembed supervise -- train ...`: the same run again and again until it is done, by exit code, here or as Ray
jobs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro

from podembed.jobs.cli.repeated import gathered
from podembed.jobs.search_path import new_process


@dataclass(frozen=True, kw_only=True)
class Supervise:
    """Run a train or resume command again, from its last commit, whenever it is preempted or killed.

    Exit codes 0 (done), 1 (the job's own error), 86 (another driver has the run) and 87 (configuration) end it. After
    85 (stopped after a commit) the next attempt follows at once. Anything else is tried again with growing pauses.
    """

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND")] = ()
    """`train ...` or `resume ...` with their flags, after `--`."""
    address: str | None = None
    """Dashboard of a Ray cluster, such as http://head:8265; attempts are then Ray jobs. Without it, processes of this
    machine.
    """
    working_dir: str = "."
    """Folder that Ray copies to the cluster."""
    max_failures: int = 5
    """Failed attempts in a row, without a new commit in between, after which it gives up."""


def split(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The supervisor's own arguments, and the command after the first `--`."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), tuple(arguments[at + 1 :])


def run(command: Supervise) -> int:
    """Supervises until the end. Returns the exit code of the last attempt.

    Raises:
      ConfigurationError: the command is none that can be supervised, or there is no cluster.
    """
    from podembed.jobs.supervise.supervision import LocalRunner, supervise
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.orchestrator.api.signals import StopSignals

    if command.max_failures < 0:
        raise ConfigurationError(f"Found --max-failures {command.max_failures}. Expected 0 or more.")
    name, url, first, later = _attempts(command.command, is_remote=command.address is not None)
    if command.address is None:
        runner: Any = LocalRunner(new_process())
    else:
        from podembed.jobs.supervise.ray_jobs import RayJobRunner

        runner = RayJobRunner(address=command.address, working_dir=command.working_dir, name=name, notice=_notice)
    with StopSignals(words="the command is asked to commit and leave") as stop:
        return supervise(
            runner,
            first=first,
            later=later,
            max_failures=command.max_failures,
            progress=lambda: _newest_commit(url),
            notice=_notice,
            stop=stop,
            url=url,
        )


def _attempts(command: tuple[str, ...], *, is_remote: bool) -> tuple[str, str, list[str], list[str]]:
    """The run's name, its folder, and the arguments of the first attempt and of later ones."""
    from podembed.jobs.cli.main import Resume, Train, default_storage
    from podembed.orchestrator.api.config import ConfigurationError

    if not command or command[0] not in ("train", "resume"):
        raise ConfigurationError(
            f"Found the command {' '.join(command) or '(none)'!r}. Expected train or resume with its flags after `--`: "
            "podembed supervise -- train --hosts 2"
        )
    if command[0] == "resume":
        resumed = tyro.cli(Resume, prog="podembed resume", args=gathered(command[1:], Resume))
        name = resumed.run.rstrip("/").rsplit("/", 1)[-1]
        return name, resumed.run, list(command), [*command, "--take-over"]
    trained = tyro.cli(Train, prog="podembed train", args=gathered(command[1:], Train))
    first = list(command)
    if trained.name is None:
        label = (trained.job or "run").rsplit(":", 1)[-1]
        trained = replace(trained, name=f"{label}-{time.strftime('%Y%m%d-%H%M%S')}")
        first += ["--name", str(trained.name)]
    if is_remote and trained.storage is None:
        # Each submission has a working folder of its own, so the default must be the job's and not this process's.
        storage = os.path.expanduser("~/.podembed/runs")
    else:
        storage = trained.storage or default_storage()
    return str(trained.name), f"{storage.rstrip('/')}/{trained.name}", first, [*first, "--resume"]


def _newest_commit(url: str) -> str | None:
    """Name of the run's head, None if it has none or cannot be seen from here."""
    from podembed.orchestrator.commit.lease_files import read_head
    from podembed.workers.storage.storage_errors import StorageError
    from podembed.workers.storage.store import Store

    try:
        return read_head(Store(url))
    except (StorageError, OSError, ValueError):
        return None


def _notice(text: str) -> None:
    print(f"supervise: {text}", flush=True)
