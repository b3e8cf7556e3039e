"""Whether the records of a run can be read: what it is, which commits count, what it keeps, its history, data and
settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from podembed.orchestrator.commit.holder import read_heartbeat
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.commit.run_record import RUN_FILE, RunRecord, read_run
from podembed.orchestrator.commit.verification import Damage
from podembed.orchestrator.planning.recorded_plans import damaged_plans
from podembed.orchestrator.run.history_record import FOLDER as HISTORY
from podembed.orchestrator.run.history_record import read_history
from podembed.orchestrator.run.input_record import INPUT_FILE, read_input
from podembed.orchestrator.run.job_settings import read_settings
from podembed.orchestrator.run.policy_record import FOLDER as POLICIES
from podembed.orchestrator.run.policy_record import read_policies
from podembed.tools.fsck.findings import Finding, damage_of, finding_of_run
from podembed.tools.metrics.segments import FOLDER as METRICS
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


def check_record(store: Store) -> tuple[RunRecord | None, list[Finding]]:
    """The record of the run, or None and why it cannot be read."""
    try:
        return read_run(store), []
    except (NameNotFound, DocumentRefused) as error:
        return None, [finding_of_run(damage_of(RUN_FILE, error, "the run's record"), "what the run is")]


def check_lineage(store: Store) -> tuple[tuple[str, ...], list[Finding]]:
    """The commits that count, the newest first. Where bases are damaged, those that the others still tell."""
    try:
        return read_lineage(store), []
    except (NameNotFound, DocumentRefused) as error:
        return read_lineage(store, rebuild=True), [
            finding_of_run(damage_of(error.name, error, "bases that lead from commit to commit"), "which commits count")
        ]
    except ValueError as error:  # A base that names a newer commit.
        damage = Damage(name="lease", found=str(error), expected="bases that lead from commit to commit")
        return (), [finding_of_run(damage, "which commits count")]


def record_findings(store: Store, record: RunRecord | None, lineage: Sequence[str]) -> Iterator[Finding]:
    """What is wrong with the records that no commit needs. Of most kinds only the newest is looked at, since no program
    reads the others.

    Args:
      record: None where it cannot be read.
      lineage: the commits that counted before; a record of the loss follows each.
    """
    # A run that was made of other files has no driver's records; without its own record nobody knows.
    if record is not None and not record.is_imported:
        yield from _missing(store, lineage)
    yield from _unreadable(read_policies, store, expected="which commits are kept", place="the keep policies")
    yield from _unreadable(read_history, store, expected="a record", place="loss and evaluations")
    for error in read_input(store).damaged:
        yield finding_of_run(damage_of(error.name, error, ""), "the data files")
    for error in damaged_plans(store):
        yield finding_of_run(damage_of(error.name, error, ""), "how tables lie")
    yield from _unreadable(read_settings, store, expected="a record", place="changed arguments of the job")


def _missing(store: Store, lineage: Sequence[str]) -> Iterator[Finding]:
    """Kinds of records of which there are none, though a driver of a run with commits has written them. Older programs
    wrote none of any kind, so one kind that is there tells that the others were.
    """
    if not lineage:
        return  # A driver that was killed at its start may have left any of them out, and nothing is lost with them.
    # Before the folders are listed: the driver may be at work.
    has_left_history = _has_left_history(store, lineage)
    is_there = {folder: bool(store.children(folder)) for folder in (METRICS, HISTORY, POLICIES)}
    is_there[INPUT_FILE] = store.exists(INPUT_FILE)
    expected = [(INPUT_FILE, "the data files"), (f"{POLICIES}/", "the keep policies")]
    expected += [(f"{HISTORY}/", "loss and evaluations")] if has_left_history else []
    for file, place in expected:
        if any(is_there.values()) and not is_there[file.removesuffix("/")]:
            yield finding_of_run(Damage(name=file, found="no file", expected="a record"), place)


def _has_left_history(store: Store, lineage: Sequence[str]) -> bool:
    """Whether a driver went on after a commit, and so after the record that follows it: to its next commit, or to its
    end, where it removes its heartbeat.
    """
    generations = [parsed[1] for name in lineage if (parsed := parse_commit_name(name))]
    return len(set(generations)) < len(generations) or any(
        read_heartbeat(store, generation) is None for generation in set(generations)
    )


def _unreadable(read: Callable[[Store], object], store: Store, *, expected: str, place: str) -> Iterator[Finding]:
    try:
        read(store)
    except (NameNotFound, DocumentRefused) as error:
        yield finding_of_run(damage_of(error.name, error, expected), place)
