"""What to do about each finding of a check. It asks the storage for the names that `fsck.remedies` decides from."""

from __future__ import annotations

from dataclasses import replace

from podembed.orchestrator.commit.lease_files import newest_base_file, read_lineage
from podembed.orchestrator.run.input_record import CHANGES_FOLDER
from podembed.tools.fsck.findings import CheckedCommit, Finding, RunCheck
from podembed.tools.fsck.remedies import SHORTER_CHAIN, remedy_of, remedy_of_commit, remedy_of_index
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


def with_remedies(store: Store, check: RunCheck) -> RunCheck:
    """The same with what to do about each finding; asks the storage for names."""
    whole = [commit.name for commit in check.commits if commit.counts and commit.can_be_restored]
    newest_base, needed_base = newest_base_file(store), _needed_base(store)
    newest_change = max((f"{CHANGES_FOLDER}/{name}" for name in store.children(CHANGES_FOLDER)), default=None)

    def of_run(finding: Finding) -> Finding:
        remedy = remedy_of(
            finding.file,
            location=check.location,
            newest_base=newest_base,
            needed_base=needed_base,
            newest_change=newest_change,
            newest_commit=whole[0] if whole else None,
        )
        return replace(finding, remedy=remedy)

    def of_commit(commit: CheckedCommit) -> CheckedCommit:
        of_rows = remedy_of_commit(location=check.location, is_head=commit.is_head, counts=commit.counts, whole=whole)
        of_index = remedy_of_index(location=check.location, is_head=commit.is_head)
        findings = (replace(one, remedy=of_index if one.spares_rows else of_rows) for one in commit.findings)
        return replace(commit, findings=tuple(findings))

    # The chain's findings name a commit but are of the run: it can go back less far, which stops no driver.
    findings = [
        of_run(finding) if finding.commit is None else replace(finding, remedy=SHORTER_CHAIN)
        for finding in check.findings
    ]
    return replace(check, findings=tuple(findings), commits=tuple(map(of_commit, check.commits)))


def _needed_base(store: Store) -> str | None:
    """The older base that the lineage needs, if it is lost."""
    try:
        read_lineage(store, rebuild=True, whole=True)
    except DocumentRefused as error:
        return error.name
    return None
