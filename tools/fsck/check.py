"""Checking a run offline: every byte of its commits, the chain that joins them, its record and its leases. Changes
nothing.

Each damage names the file, so that a user can judge what is lost. For a chunk it also names table, array, bucket and
rows. It also says what to do, and what depends on the file. What no reader uses is reported apart: attempts that never
became commits, commits of drivers that were fenced, extra files. It does no harm, and `podembed prune` removes it.
Heartbeats are advisory and may be torn, and `metrics/` is for people alone: neither is looked at. A driver may be at
work meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from podembed.orchestrator.commit.deletions import read_deletions
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.published import is_copy
from podembed.orchestrator.run.reference import load_named, open_published
from podembed.tools.fsck.advice import with_remedies
from podembed.tools.fsck.chain import chain_findings
from podembed.tools.fsck.commits import check_commit
from podembed.tools.fsck.copies import check_copy
from podembed.tools.fsck.findings import CheckedCommit, RunCheck, damage_of, finding_of_run
from podembed.tools.fsck.leases import lease_findings
from podembed.tools.fsck.leftovers import Leftover, find_leftovers
from podembed.tools.fsck.run_records import check_lineage, check_record, record_findings
from podembed.tools.fsck.versions import version_findings
from podembed.workers.storage.store import Store


def check_run(
    url: str | Store,
    *,
    commit: str | None = None,
    include_uncounted: bool = False,
    on_commit: Callable[[CheckedCommit], None] = lambda checked: None,
) -> RunCheck:
    """Reads every byte of a run's commits and compares it with what was committed. Of a copy for servers it reads what
    servers read.

    Args:
      commit: check this one alone, and neither chain, leases nor leftovers.
      include_uncounted: also the commits that are not in the lineage.
      on_commit: told each commit when it has been read.

    Raises:
      ConfigurationError: there is no run, or no commit of this name.
      StoreUnavailable: the storage does not answer.
    """
    store = url if isinstance(url, Store) else open_published(url)
    if is_copy(store):
        return check_copy(store, commit=commit, on_commit=on_commit)
    record, findings = check_record(store)
    # Before the lineage is read, so that one that goes meanwhile is known to have been there.
    published = set(read_commit_names(store))
    lineage, lineage_findings = check_lineage(store)
    told = {finding.file for finding in lineage_findings}
    if commit is not None:
        _require(store, commit)
        names = [commit]
    else:
        findings += [
            *record_findings(store, record, lineage),
            *lineage_findings,
            *version_findings(store),
            *(finding_of_run(damage, "lease") for damage in lease_findings(store) if damage.name not in told),
        ]
        names = [*lineage]
        if include_uncounted or lineage_findings:
            # Without a lineage it is unknown which ones count, so all are worth a look.
            names += sorted(set(read_commit_names(store)) - set(lineage))
    published |= set(read_commit_names(store))
    # After the manifests: a pass writes its record before the first goes, and removes it when nothing is left to be
    # listed below.
    going, refused = read_deletions(store)
    if commit is None:
        findings += [
            finding_of_run(damage_of(error.name, error, "a record"), "which commits are being deleted")
            for error in refused
        ]
    checked = []
    for name in names:
        checked.append(check_commit(store, name, lineage, record, was_published=name in published))
        on_commit(checked[-1])
    leftovers: tuple[Leftover, ...] = ()
    # Without a lineage everything would look left over.
    if commit is None and not lineage_findings:
        leftovers = find_leftovers(store, going=going)
        findings += chain_findings(store, lineage, seen=published | going, leftovers=leftovers)
    return with_remedies(
        store,
        RunCheck(location=store.location, commits=tuple(checked), findings=tuple(findings), leftovers=leftovers),
    )


def _require(store: Store, name: str) -> None:
    """Refuses a name that no driver published; a damaged manifest is for the check."""
    if name not in read_commit_names(store):
        load_named(store, name)
