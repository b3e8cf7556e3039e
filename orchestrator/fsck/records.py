"""Whether the records of a run can be read: what it is, which commits count, what it keeps, its history, data and
settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.run_record import RUN_FILE, RunRecord, read_run
from podembed.orchestrator.commit.verification import Damage
from podembed.orchestrator.fsck.findings import Finding, damage_of, finding_of_run
from podembed.orchestrator.planning.records import damaged_plans
from podembed.orchestrator.run.history_record import read_history
from podembed.orchestrator.run.input_record import read_input
from podembed.orchestrator.run.job_settings import read_settings
from podembed.orchestrator.run.policy_record import read_policies
from podembed.workers.storage.errors import NameNotFound
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


def record_findings(store: Store) -> Iterator[Finding]:
    """What is wrong with the records that no commit needs. Of most kinds only the newest is looked at, since no program
    reads the others.
    """
    yield from _unreadable(read_policies, store, expected="which commits are kept", place="the keep policies")
    yield from _unreadable(read_history, store, expected="a record", place="loss and evaluations")
    for error in read_input(store).damaged:
        yield finding_of_run(damage_of(error.name, error, ""), "the data files")
    for error in damaged_plans(store):
        yield finding_of_run(damage_of(error.name, error, ""), "how tables lie")
    yield from _unreadable(read_settings, store, expected="a record", place="changed arguments of the job")


def _unreadable(read: Callable[[Store], object], store: Store, *, expected: str, place: str) -> Iterator[Finding]:
    try:
        read(store)
    except (NameNotFound, DocumentRefused) as error:
        yield finding_of_run(damage_of(error.name, error, expected), place)
