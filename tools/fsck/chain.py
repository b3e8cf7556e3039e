"""Whether the commits of a run follow one another: each one's parent must be the one before it in the lineage."""

from __future__ import annotations

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.manifest import commit_file, parse_commit_name
from podembed.orchestrator.commit.verification import Damage
from podembed.tools.fsck.findings import Finding, finding_of_commit
from podembed.tools.fsck.leftovers import Leftover
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store


def chain_findings(
    store: Store, lineage: tuple[str, ...], *, seen: set[str], leftovers: tuple[Leftover, ...]
) -> list[Finding]:
    """Commits whose parent is not the one before them in the lineage. A parent between the two is in order where the
    keep policy has deleted it, or is about to.

    Args:
      seen: commits that were published when the check began, or were being deleted.
      leftovers: what no commit of the lineage needs. The keep policy leaves nothing of that kind of a commit that it
        deletes.
    """
    published = set(read_commit_names(store))
    chain = [name for name in lineage if name in published]
    torn = {left.path for left in leftovers}
    findings = []
    for at, name in enumerate(chain):
        try:
            parent = checkpoint.load(store, name).parent
        except StorageError:
            continue  # Told by the commit's own check, or deleted meanwhile.
        before = chain[at + 1] if at + 1 < len(chain) else None
        if parent == before or (before is None and parent not in published):
            continue
        is_left = f"data/{parent}" in torn and parent not in seen
        if parent not in published and not is_left and _is_between(before, parent, name):
            continue
        state = "that exists but is not before it in the lineage" if parent in published else "that is missing"
        damage = Damage(
            name=commit_file(name),
            found=f"parent {parent}, {state}" if parent else "no parent",
            expected=f"parent {before}, or one after it of which nothing is left"
            if before
            else "a parent before all that are kept, or none",
        )
        findings.append(finding_of_commit(name, damage, "the chain of commits"))
    return findings


def _is_between(before: str | None, parent: str | None, name: str) -> bool:
    """Whether a commit that is gone may have been between two of the lineage. Steps rise along it, generations at equal
    steps.
    """
    first, middle, last = (parse_commit_name(commit or "") for commit in (before, parent, name))
    return first is not None and middle is not None and last is not None and first < middle < last
