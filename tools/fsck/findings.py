"""What a check of a run finds, as values: findings, checked commits, and the whole check."""

from __future__ import annotations

from dataclasses import dataclass

from podembed.orchestrator.commit.verification import Damage
from podembed.tools.fsck.leftovers import Leftover
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.strict_json import DocumentRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
      commit: commit that needs the file; None for what belongs to the whole run.
      file: relative to the run.
      place: what the file holds, such as table, array, bucket and rows.
      remedy: what to do, and what depends on the file.
      spares_rows: the commit can be restored nevertheless.
    """

    commit: str | None
    file: str
    place: str
    found: str
    expected: str
    remedy: str = ""
    spares_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCommit:
    """One commit after its check.

    Attributes:
      counts: whether it is in the lineage.
      is_gone: it was deleted while it was checked, by a driver's keep policy; its findings mean nothing and are left
        out.
      num_files, num_bytes: that it names, 0 if its manifest cannot be read.
    """

    name: str
    counts: bool
    is_head: bool
    is_gone: bool
    num_files: int
    num_bytes: int
    findings: tuple[Finding, ...]

    @property
    def can_be_restored(self) -> bool:
        return not self.is_gone and all(finding.spares_rows for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheck:
    """What `check_run` found. `findings` are those of the run as a whole; each commit has its own."""

    location: str
    commits: tuple[CheckedCommit, ...]
    findings: tuple[Finding, ...]
    leftovers: tuple[Leftover, ...]
    is_copy: bool = False

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        return (*self.findings, *(finding for commit in self.commits for finding in commit.findings))

    @property
    def is_intact(self) -> bool:
        return not self.all_findings


def damage_of(file: str, error: Exception, expected: str) -> Damage:
    """What an error says of a file. `file` and `expected` count where the error does not say them itself."""
    if isinstance(error, DocumentRefused):
        return Damage(name=error.name, found=error.found, expected=error.expected)
    if isinstance(error, NameNotFound):
        return Damage(name=error.name, found="no file", expected=expected)
    return Damage(name=file, found=str(error), expected=expected)


def finding_of_run(damage: Damage, place: str) -> Finding:
    """A finding of what belongs to the whole run."""
    return Finding(commit=None, file=damage.name, place=place, found=damage.found, expected=damage.expected)


def finding_of_commit(commit: str, damage: Damage, place: str) -> Finding:
    """A finding of a file that a commit needs."""
    return Finding(
        commit=commit,
        file=damage.name,
        place=place,
        found=damage.found,
        expected=damage.expected,
        spares_rows=damage.spares_rows,
    )
