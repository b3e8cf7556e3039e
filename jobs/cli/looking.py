"""`podembed fsck | diff | export | import | extract`: the commands that look at runs and change none."""

from __future__ import annotations

import shlex
import sys

from podembed.jobs.cli.tools import Diff, Export, Extract, Fsck, Import
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.text import format_bytes, printable
from podembed.orchestrator.run.reference import is_run, open_commit
from podembed.tools.fsck import report, saved
from podembed.tools.fsck.check import check_run
from podembed.tools.inspect import describe
from podembed.tools.inspect import diff as compare
from podembed.tools.inspect import extract as rows
from podembed.tools.inspect.scan_values import scan_values
from podembed.workers.stepwise.checkpoint import saved_paths
from podembed.workers.storage.store import Store

EXIT_DIFFERENT = 1


def fsck(command: Fsck) -> int:
    """Carries out `podembed fsck`. Returns the exit code."""
    paths = [] if is_run(Store(command.run)) else saved_paths(command.run)
    if paths:
        return _fsck_saved(command, paths)
    check = check_run(
        command.run,
        commit=command.commit,
        include_uncounted=command.all,
        on_commit=lambda checked: print(f"read {checked.name}", file=sys.stderr),
    )
    print(report.render(check))
    if not check.is_intact:
        return EXIT_DIFFERENT
    if command.values and not check.is_copy:
        _tell_values(command.run, command.commit)
    return 0


def _fsck_saved(command: Fsck, paths: list[str]) -> int:
    if command.commit is not None or command.all or command.values:
        raise ConfigurationError(
            f"Found --commit, --all or --values for {command.run}, which holds checkpoints of the step-by-step mode. "
            "Expected a run for them, since only runs have commits. Leave the flags out."
        )
    checked = saved.check_saves(paths, on_save=lambda save: print(f"read {save.location}", file=sys.stderr))
    print(saved.render(checked))
    return 0 if all(save.is_intact for save in checked) else EXIT_DIFFERENT


def _tell_values(run: str, commit: str | None) -> None:
    state = open_commit(run, commit=commit)
    findings = scan_values(state)
    print(f"\nValues of {state.manifest.name}: {'all finite' if not findings else 'NOT ALL FINITE'}")
    for finding in findings:
        print(f"  {finding.describe()}")


def diff(command: Diff) -> int:
    """Carries out `podembed diff`. Returns the exit code."""
    difference = compare.diff(open_commit(command.one), open_commit(command.other))
    print(compare.render(difference))
    return 0 if difference.is_equal else EXIT_DIFFERENT


def export(command: Export) -> int:
    """Carries out `podembed export`. Returns the exit code."""
    if command.layout == "sparsecore":
        return _export_sparsecore(command)
    flags = {"chips": command.chips, "cores": command.cores, "stack": command.stack, "spec": command.spec}
    for flag in (flag for flag, value in flags.items() if value not in (None, ())):
        raise ConfigurationError(f"Found --{flag} without --layout sparsecore. Expected both. Pass both or none.")
    if command.table is None:
        raise ConfigurationError(
            "Found no --table without --layout sparsecore. Expected one table for one file. Pass --table NAME; "
            "`podembed inspect` lists the tables."
        )
    written = describe.export(
        open_commit(command.run, commit=command.commit),
        command.table,
        format=command.format,
        out=command.out,
        with_slots=command.slots,
        force=command.force,
    )
    arrays = ", ".join(f"{name} [{written.num_rows}, {width}]" for name, width in written.widths.items())
    size = format_bytes(written.size_bytes)
    print(printable(f"{written.path}: {arrays} of table '{written.table}' at {written.commit}, {size}"))
    return 0


def _export_sparsecore(command: Export) -> int:
    from podembed.tools.sparsecore import export as sparsecore

    if command.force or command.format != "npy":
        found = "--force" if command.force else f"--format {command.format}"
        raise ConfigurationError(
            f"Found {found} with --layout sparsecore. Expected none, since it writes a new folder of .npy files. Leave "
            "it out."
        )
    state = open_commit(command.run, commit=command.commit)
    stacks = sparsecore.stacks_for(
        state,
        spec=command.spec,
        table=command.table,
        chips=command.chips,
        cores=command.cores,
        together=[group.split(",") for group in command.stack],
    )
    written = sparsecore.export_sparsecore(state, stacks, out=command.out, with_slots=command.slots)
    for stack, arrays in zip(written.stacks, written.arrays, strict=True):
        names = ", ".join(table.name for table in stack.tables)
        print(printable(f"{stack.name}: {', '.join(arrays)} [{stack.num_rows}, {stack.dim}] of {names}"))
    cores = written.stacks[0].num_cores
    print(printable(f"{written.folder}: {written.commit} for {cores} SparseCores, {format_bytes(written.size_bytes)}"))
    return 0


def import_tables(command: Import) -> int:
    """Carries out `podembed import`. Returns the exit code."""
    from podembed.tools.sparsecore.imported import import_sparsecore

    manifest = import_sparsecore(command.folder, command.out, single_writer=command.single_writer)
    for table in manifest.tables:
        slots = "".join(f", {slot.name}" for slot in table.slots)
        print(printable(f"{table.name}: rows{slots} [{table.num_rows}, {table.dim}]"))
    print(printable(f"{command.out}: {manifest.name}, {format_bytes(manifest.size_bytes)}"))
    print(f"Begin from it: podembed train --warm-start {shlex.quote(command.out)} --warm-start-rules @dense=reinit ...")
    return 0


def extract(command: Extract) -> int:
    """Carries out `podembed extract`. Returns the exit code."""
    if not command.ids:
        raise ConfigurationError(
            "Found no row number. Expected at least one. Add some: podembed extract RUN TABLE 7 42."
        )
    state = open_commit(command.run, commit=command.commit)
    print(rows.render(rows.extract(state, command.table, command.ids, with_slots=command.slots)))
    return 0
