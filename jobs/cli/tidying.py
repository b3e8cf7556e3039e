"""`podembed compact | forget | prune`: the commands that tidy a run. No driver may be at work meanwhile."""

from __future__ import annotations

import shlex

from podembed.jobs.cli.settings import parse_interval
from podembed.jobs.cli.tools import Compact, Forget, Prune
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.intervals import epochs_of
from podembed.orchestrator.api.text import format_bytes, plural, printable
from podembed.orchestrator.commit.run_record import read_run
from podembed.orchestrator.run.policy_record import PolicyRecord, read_policies
from podembed.orchestrator.run.reference import open_run_store
from podembed.tools.inspect import compact as compacting
from podembed.tools.inspect import forget as forgetting
from podembed.tools.inspect import prune as pruning
from podembed.workers.storage.strict_json import DocumentRefused


def compact(command: Compact) -> int:
    """Carries out `podembed compact`. Returns the exit code."""
    manifest = compacting.compact(command.run, single_writer=command.single_writer)
    print(f"{manifest.name} is a full commit of {format_bytes(manifest.size_bytes)}")
    return 0


def forget(command: Forget) -> int:
    """Carries out `podembed forget`. Returns the exit code."""
    if not command.keys:
        raise ConfigurationError("Found no key. Expected at least one. Add some: podembed forget RUN TABLE 7 shoes.")
    found = forgetting.forget(command.run, command.table, command.keys, single_writer=command.single_writer)
    lines = []
    if found.commit is not None:
        rows, waiting = plural(len(found.rows), "row"), plural(len(found.waiting), "waiting key")
        lines.append(f"{found.commit} is the newest commit, without {rows} and {waiting} of table '{command.table}'")
    if found.absent:
        lines.append(f"not in the newest commit before: {', '.join(found.absent)}")
    if found.older:
        words = ["podembed", "prune", command.run, "--holding", command.table, *command.keys]
        lines += [f"still in {', '.join(found.older)}; to delete these: {shlex.join(words)}"]
    print(printable("\n".join(lines)))
    return 0


def prune(command: Prune) -> int:
    """Carries out `podembed prune`. Returns the exit code."""
    if command.keep is None and not command.holding:
        raise ConfigurationError("Found neither --keep nor --holding. Expected one of them. Pass --keep 2 or more.")
    if len(command.holding) == 1:
        raise ConfigurationError(
            f"Found --holding {command.holding[0]} alone. Expected a table and keys. Add some: --holding TABLE 7 shoes."
        )
    also, recorded = None, _recorded_policies(command)
    if command.keep_every is not None or command.keep_best is not None:
        own = CheckpointConfig() if recorded is None else recorded.config
        also = CheckpointConfig(
            keep_every_steps=own.keep_every_steps if command.keep_every is None else _keep_every(command),
            keep_best=own.keep_best if command.keep_best is None else command.keep_best,
            metric=own.metric,
            metric_order=own.metric_order,
        ).keep_policies
    removal = pruning.prune(
        command.run,
        num_to_keep=command.keep,
        also=also,
        holding=command.holding,
        single_writer=command.single_writer,
    )
    for name in removal.commits:
        print(f"deleted commit {name}")
    for name in sorted(set(removal.attempts) - set(removal.commits)):
        print(f"deleted attempt {name}")
    print(f"{removal.num_files:,} files, {format_bytes(removal.num_bytes)} deleted")
    return 0


def _keep_every(command: Prune) -> int | None:
    """The steps of `--keep-every`; None for 0.

    Raises:
      ConfigurationError: it is neither steps nor whole steps of the run's epochs.
    """
    text = command.keep_every or ""
    if text.strip() == "0":
        # An interval of a run has at least one step; here 0 ends what the run keeps by it.
        return None
    # The record is needed for nothing else, so where it is damaged steps will still do.
    is_epochs = epochs_of(text) is not None
    steps_per_epoch = read_run(open_run_store(command.run)).steps_per_epoch if is_epochs else None
    return parse_interval("--keep-every", text, steps_per_epoch)


def _recorded_policies(command: Prune) -> PolicyRecord | None:
    """What the run keeps besides its newest commits.

    Raises:
      ConfigurationError: the record is damaged, and the flags do not say it.
    """
    try:
        return read_policies(open_run_store(command.run))
    except DocumentRefused as error:
        if command.keep_every is not None and command.keep_best == 0:
            return None
        raise ConfigurationError(
            f"Found {error.found} in {error.name}. Expected the record of which commits the run keeps besides its "
            "newest. Say it with --keep-every N (0 for none) and --keep-best 0. The metric that was to be best is lost."
        ) from error
