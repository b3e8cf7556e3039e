"""Whether the records of a run can be read: what it is, which commits count, what it keeps, its history, data and
settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from podembed.orchestrator.commit.holder import read_heartbeat
from podembed.orchestrator.commit.lease_files import read_claims, read_lineage
from podembed.orchestrator.commit.run_record import RUN_FILE, RunRecord, read_run
from podembed.orchestrator.commit.verification import Damage
from podembed.orchestrator.fsck.findings import Finding, damage_of, finding_of_run
from podembed.orchestrator.metrics.segments import FOLDER as METRICS
from podembed.orchestrator.planning.records import damaged_plans
from podembed.orchestrator.run.history_record import FOLDER as HISTORY
from podembed.orchestrator.run.history_record import read_history
from podembed.orchestrator.run.input_record import INPUT_FILE, read_input
from podembed.orchestrator.run.job_settings import read_settings
from podembed.orchestrator.run.policy_record import FOLDER as POLICIES
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


def record_findings(store: Store, record: RunRecord | None, lineage: Sequence[str]) -> Iterator[Finding]:
    """What is wrong with the records that no commit needs. Of most kinds only the newest is looked at, since no program
    reads the others.

    Args:
      record: None where it cannot be read.
      lineage: the commits that counted before; a record of the loss follows each.
    """
    if record is None or not record.is_imported:
        yield from _missing(store, lineage)
    yield from _unreadable(read_policies, store, expected="which commits are kept", place="the keep policies")
    yield from _unreadable(read_history, store, expected="a record", place="loss and evaluations")
    for error in read_input(store).damaged:
        yield finding_of_run(damage_of(error.name, error, ""), "the data files")
    for error in damaged_plans(store):
        yield finding_of_run(damage_of(error.name, error, ""), "how tables lie")
    yield from _unreadable(read_settings, store, expected="a record", place="changed arguments of the job")


def _missing(store: Store, lineage: Sequence[str]) -> Iterator[Finding]:
    """Records that a driver writes, of which there are none. Older programs wrote none of them, so one that is there
    tells that the others were.
    """
    found = {name for name in (INPUT_FILE, POLICIES, HISTORY, METRICS) if name in store.children()}
    newest = max(read_claims(store), default=0)
    # Of a driver that is at work, the record of its last commit may still come.
    is_at_work = read_heartbeat(store, newest) is not None
    expected = {INPUT_FILE: bool(newest), POLICIES: bool(lineage), HISTORY: len(lineage) > is_at_work}
    places = {INPUT_FILE: "the data files", POLICIES: "the keep policies", HISTORY: "loss and evaluations"}
    for name, is_expected in expected.items():
        is_there = name in found and (name == INPUT_FILE or store.children(name))
        if found and is_expected and not is_there:
            file = name if name == INPUT_FILE else f"{name}/"
            yield finding_of_run(Damage(name=file, found="no file", expected="a record"), places[name])


def _unreadable(read: Callable[[Store], object], store: Store, *, expected: str, place: str) -> Iterator[Finding]:
    try:
        read(store)
    except (NameNotFound, DocumentRefused) as error:
        yield finding_of_run(damage_of(error.name, error, expected), place)
