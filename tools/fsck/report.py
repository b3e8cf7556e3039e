"""The text of a check of a run."""

from __future__ import annotations

from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.tools.fsck.findings import CheckedCommit, Finding, RunCheck


def render(check: RunCheck) -> str:
    """Text of a check, ready to print."""
    rows = [("commit", "files", "size", "state")]
    rows += [_commit_line(commit) for commit in check.commits]
    what = "Copy for servers" if check.is_copy else "Run"
    parts = [f"{what} in {check.location}", columns(rows) if check.commits else "No commits"]
    if check.all_findings:
        parts.append("Damage\n" + "\n".join(map(_finding_lines, check.all_findings)))
    if check.leftovers:
        lines = [
            (left.path, plural(left.num_files, "file"), format_bytes(left.num_bytes), left.what)
            for left in check.leftovers
        ]
        parts.append("Left over; no reader uses it\n" + columns(lines))
    damaged = len(check.all_findings)
    parts.append(f"{plural(damaged, 'damage')} found" if damaged else "No damage found")
    return printable("\n\n".join(parts))


def _commit_line(commit: CheckedCommit) -> tuple[str, ...]:
    state = "head, " if commit.is_head else "" if commit.counts else "does not count, "
    if commit.is_gone:
        state += "deleted while it was checked"
    else:
        state += f"DAMAGED: {plural(len(commit.findings), 'damage')}" if commit.findings else "intact"
    return (commit.name, f"{commit.num_files:,}", format_bytes(commit.num_bytes), state)


def _finding_lines(finding: Finding) -> str:
    lines = [f"  {finding.file}"]
    if finding.place:
        lines.append(f"    {finding.place}")
    lines.append(f"    found {finding.found}; expected {finding.expected}")
    if finding.commit:
        lines.append(f"    needed by {finding.commit}")
    if finding.remedy:
        lines.append(f"    to do: {finding.remedy}")
    return "\n".join(lines)
