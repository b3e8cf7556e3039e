"""What the flags of `podembed train` and `podembed resume` mean: numbers with units, and the settings of the trainer.

Where a flag is missing, the length of the run chooses the value.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from podembed.jobs.chaos.plan_file import read_plan
from podembed.orchestrator.api.config import (
    CheckpointConfig,
    ConfigurationError,
    MetricsConfig,
    RunConfig,
    ScalingConfig,
)
from podembed.orchestrator.api.intervals import epochs_of, whole_steps
from podembed.orchestrator.run.policy_record import PolicyRecord

if TYPE_CHECKING:
    from podembed.jobs.cli.main import Resume, Train


COMMITS_A_RUN = 10
# Where no flag says how often: a commit takes training some hundredths of a second, and half a second beside it.
SECONDS_APART = 5.0
EVALUATIONS_A_RUN = 4
KEPT_COMMITS = 3
FEWEST_STEPS = 20  # between two commits or evaluations, unless a flag says otherwise


def parse_hosts(text: str, flag: str = "--hosts") -> int | tuple[int, int]:
    """`4`, or `2-8` for a range.

    Raises:
      ConfigurationError: it is neither.
    """
    least, separator, most = text.partition("-")
    if not least.isdecimal() or not (most.isdecimal() if separator else not most):
        raise ConfigurationError(
            f"Found {flag} {shlex.quote(text)}. Expected a number such as 4, or a range such as 2-8."
        )
    return (int(least), int(most)) if separator else int(least)


def parse_interval(flag: str, text: str, steps_per_epoch: int | None) -> int:
    """Steps of an interval: `500`, or epochs such as `1epoch`, `0.5epoch` and `2epochs`, which must be whole steps.

    Args:
      steps_per_epoch: None where it is not known yet; any number of epochs is whole then.

    Raises:
      ConfigurationError: it is neither, or no whole number of steps.
    """
    epochs = epochs_of(text)
    if epochs is None:
        try:
            steps = int(text)
        except ValueError as error:
            raise ConfigurationError(
                f"Found {flag} {shlex.quote(text)}. Expected steps such as 500, or epochs such as 1epoch or 0.5epoch."
            ) from error
        if steps < 1:
            raise ConfigurationError(f"Found {flag} {steps}. Expected at least 1 step. Leave it out for its default.")
        return steps
    if epochs <= 0:
        raise ConfigurationError(f"Found {flag} {shlex.quote(text)}. Expected more than none, such as 1epoch.")
    return whole_steps(flag, epochs, steps_per_epoch or epochs.denominator, ConfigurationError)


def parse_resources(pairs: tuple[str, ...]) -> dict[str, float] | None:
    """`CPU=8 GPU=1` as Ray has it; None without any.

    Raises:
      ConfigurationError: a pair that is not a name and a number of at least 0, or two for one name.
    """
    resources: dict[str, float] = {}
    for pair in pairs:
        name, _, amount = pair.partition("=")
        if name in resources:
            raise ConfigurationError(
                f"Found --resources {name}=... twice. Expected one amount for it. Leave one of them out."
            )
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = -1.0
        if not name or not 0 <= resources[name] < math.inf:
            raise ConfigurationError(
                f"Found --resources {shlex.quote(pair)}. Expected a resource of Ray and its amount for each host, "
                "such as CPU=8 GPU=1."
            )
    return resources or None


def parse_mesh(pairs: tuple[str, ...]) -> dict[str, int] | None:
    """`data=2,model=2`, or the same in several words; None without any.

    Raises:
      ConfigurationError: an axis without a name and a whole number of at least 1, or two of one name.
    """
    mesh: dict[str, int] = {}
    for pair in ",".join(pairs).split(",") if pairs else ():
        name, _, size = pair.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in mesh:
            raise ConfigurationError(
                f"Found --mesh {shlex.quote(' '.join(pairs))}. Expected the axes of a host's devices with their sizes, "
                "each at least 1 and given once. Write --mesh data=2,model=2."
            )
        mesh[name] = int(size)
    return mesh or None


# Fields of the settings → flags, for messages about them.
_FLAGS = {
    "num_hosts": "--hosts",
    "num_slices": "--slices",
    "threads_per_host": "--threads-per-host",
    "devices_per_host": "--devices-per-host",
    "mesh": "--mesh",
    "every_steps": "--checkpoint-every",
    "every_seconds": "--checkpoint-seconds",
    "num_to_keep": "--keep",
    "keep_every_steps": "--keep-every",
    "keep_best": "--keep-best",
    "full_every": "--full-every",
    "eval_every_steps": "--eval-every",
    "max_steps": "--max-steps",
    "metric": "--metric",
    "name": "--name",
    "port": "--metrics-port",
    "tensorboard": "--tensorboard",
    "tensorboard_all": "--tensorboard-all",
}


@contextlib.contextmanager
def named_by_flags() -> Iterator[None]:
    """Names settings that are refused as on the command line, where leaving a flag out stands for None."""
    try:
        yield
    except ConfigurationError as error:
        found = re.match(r"Found (\w+)=(.*?)\. Expected", str(error))
        if found is None or found[1] not in _FLAGS:
            raise
        rest = str(error)[found.end() :].replace(", or None.", ". Leave the flag out for its default.")
        rest = rest.replace("storage_path", "--storage").replace(
            "(min, max) with 1 <= min <= max", "a range such as 2-8"
        )
        value = re.sub(r"^\((\d+), (\d+)\)$", r"\1-\2", found[2])
        raise ConfigurationError(f"Found {_FLAGS[found[1]]} {value}. Expected{rest}") from error


def scaling_config(command: Train | Resume, hosts: int | tuple[int, int]) -> ScalingConfig:
    with named_by_flags():
        return ScalingConfig(
            num_hosts=hosts,
            threads_per_host=command.threads_per_host,
            resources_per_host=parse_resources(command.resources),
            topology=command.topology,
            accelerator_type=command.accelerator_type,
            num_slices=1 if command.slices is None else parse_hosts(command.slices, "--slices"),
            platform=command.platform,
            ask_cluster=command.ask_cluster,
            in_process=command.in_process,
            devices_per_host=command.devices_per_host,
            mesh=parse_mesh(command.mesh),
            sparse_cores=command.sparse_cores,
        )


@named_by_flags()
def run_config(
    command: Train | Resume,
    *,
    steps: int,
    recorded: PolicyRecord | None = None,
    steps_per_epoch: int | None = None,
    is_stale: bool = False,
) -> RunConfig:
    """The policies that the flags ask for, with defaults for a run of so many steps.

    Args:
      recorded: what the run has kept so far; flags go before it.
      steps_per_epoch: None before it is known, when only the form of the flags is checked.
      is_stale: whether the job has staleness. Its numbers depend on where commits are, which no clock may decide then.

    Raises:
      ConfigurationError: a flag is out of its range.
    """

    def spread(flag: str, asked: str | None, parts: int) -> int:
        return max(FEWEST_STEPS, -(-steps // parts)) if asked is None else parse_interval(flag, asked, steps_per_epoch)

    def given(flag: str, asked: str | None) -> int | None:
        return None if asked is None else parse_interval(flag, asked, steps_per_epoch)

    keep, keep_best = command.keep, command.keep_best
    keep_every: int | str | None = given("--keep-every", command.keep_every)
    on_best = bool(keep_best)
    if recorded is not None:
        # None in the record keeps all commits.
        keep = recorded.num_to_keep if keep is None else keep
        keep_every = recorded.keep_every_steps if keep_every is None else keep_every
        on_best = recorded.on_best if keep_best is None else on_best
        keep_best = recorded.keep_best if keep_best is None else keep_best
    elif keep is None:
        keep = KEPT_COMMITS
    # Of a run that has kept nothing by a metric so far, the recorded one is only the default of its time.
    is_used = recorded is not None and recorded.config.uses_metric
    metric = command.metric or (recorded.metric if recorded and is_used else None)
    by_clock_alone = command.checkpoint_seconds is not None and command.checkpoint_every is None
    return RunConfig(
        checkpoint_config=CheckpointConfig(
            every_steps=None
            if by_clock_alone
            else spread("--checkpoint-every", command.checkpoint_every, COMMITS_A_RUN),
            every_seconds=command.checkpoint_seconds,
            seconds_apart=0.0 if is_stale or by_clock_alone or command.checkpoint_every else SECONDS_APART,
            on_best=on_best,
            metric=metric,
            metric_order=recorded.config.metric_order if recorded and metric == recorded.metric else None,
            num_to_keep=keep,
            keep_every_steps=keep_every,
            keep_best=keep_best or 0,
            full_every=command.full_every,
        ),
        eval_every_steps=spread("--eval-every", command.eval_every, EVALUATIONS_A_RUN),
        max_steps=given("--max-steps", command.max_steps),
        metrics_config=MetricsConfig(
            port=command.metrics_port,
            tensorboard=command.tensorboard,
            tensorboard_all=command.tensorboard_all,
            trace=command.trace,
        ),
        fault_plan=None if command.fault_plan is None else read_plan(command.fault_plan),
    )
