"""Checking a run offline: every byte of its commits, the chain that joins them, its record and its leases. Changes
nothing.

Each damage names the file, and for a chunk the table, the array, the bucket and its rows, so that one can judge what is
lost; and it says what to do, and what depends on the file. What no reader uses (attempts that never became commits,
commits of drivers that were fenced, extra files) is reported apart: it harms nobody, and `podembed prune` removes it.
Heartbeats are advisory and may be torn, so they are not looked at. A driver may be at work meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from podembed.orchestrator.api.text import columns, plural, printable
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.deletions import read_deletions
from podembed.orchestrator.commit.lease_files import newest_base_file, read_commit_names, read_lineage
from podembed.orchestrator.commit.manifest import Manifest, commit_file, parse_commit_name
from podembed.orchestrator.commit.run_record import RUN_FILE, RunRecord, read_run
from podembed.orchestrator.commit.verification import Damage, verify
from podembed.orchestrator.inspect.fsck_leases import lease_findings
from podembed.orchestrator.inspect.fsck_leftovers import Leftover, find_leftovers
from podembed.orchestrator.inspect.fsck_remedies import SHORTER_CHAIN, remedy_of, remedy_of_commit
from podembed.orchestrator.inspect.inspect_run import format_bytes
from podembed.orchestrator.run.history_record import FOLDER as HISTORY_FOLDER
from podembed.orchestrator.run.history_record import read_history
from podembed.orchestrator.run.input_record import CHANGES_FOLDER, read_input
from podembed.orchestrator.run.job_settings import FOLDER as SETTINGS_FOLDER
from podembed.orchestrator.run.job_settings import read_settings
from podembed.orchestrator.run.policy_record import FOLDER, read_policies
from podembed.orchestrator.run.reference import load_named, open_run_store
from podembed.workers.checkpoint.files import DenseFile, TableFiles, describe_bucket, describe_changes
from podembed.workers.storage.errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
      commit: that needs the file; None for what belongs to the whole run.
      file: relative to the run.
      place: what the file holds, such as table, array, bucket and rows.
      remedy: what to do, and what depends on the file.
    """

    commit: str | None
    file: str
    place: str
    found: str
    expected: str
    remedy: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheck:
    """What `check_run` found. `findings` are those of the run as a whole; each commit has its own."""

    location: str
    commits: tuple[CheckedCommit, ...]
    findings: tuple[Finding, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        return (*self.findings, *(finding for commit in self.commits for finding in commit.findings))

    @property
    def is_intact(self) -> bool:
        return not self.all_findings


def check_run(
    url: str | Store,
    *,
    commit: str | None = None,
    include_uncounted: bool = False,
    on_commit: Callable[[CheckedCommit], None] = lambda checked: None,
) -> RunCheck:
    """Reads every byte of a run's commits and compares it with what was committed.

    Args:
      commit: check this one alone, and neither chain, leases nor leftovers.
      include_uncounted: also the commits that are not in the lineage.
      on_commit: told each commit when it has been read.

    Raises:
      ConfigurationError: there is no run, or no commit of this name.
      StoreUnavailable: the storage does not answer.
    """
    store = url if isinstance(url, Store) else open_run_store(url)
    record, findings = _check_record(store)
    lineage, lineage_findings = _check_lineage(store)
    told = {finding.file for finding in lineage_findings}
    if commit is not None:
        _require(store, commit)
        names = [commit]
    else:
        findings += [
            *_check_policies(store),
            *_check_history(store),
            *(_of_run(_damage(error.name, error, ""), "the data files") for error in read_input(store).damaged),
            *_check_settings(store),
            *lineage_findings,
            *(_of_run(damage, "lease") for damage in lease_findings(store) if damage.name not in told),
        ]
        names = [*lineage]
        if include_uncounted or lineage_findings:
            # Without a lineage nobody knows which ones count, so all are worth a look.
            names += sorted(set(read_commit_names(store)) - set(lineage))
    published = set(read_commit_names(store))
    # After the manifests: a pass writes its record before the first goes, and removes it when nothing is left to be
    # listed below.
    going, refused = read_deletions(store)
    if commit is None:
        findings += [
            _of_run(_damage(error.name, error, "a record"), "which commits are being deleted") for error in refused
        ]
    checked = []
    for name in names:
        checked.append(_check_commit(store, name, lineage, record, was_published=name in published))
        on_commit(checked[-1])
    leftovers: tuple[Leftover, ...] = ()
    # Without a lineage everything would look left over.
    if commit is None and not lineage_findings:
        leftovers = find_leftovers(store, going=going)
        findings += _chain_findings(store, lineage, seen=published | going, leftovers=leftovers)
    return with_remedies(
        store,
        RunCheck(location=store.location, commits=tuple(checked), findings=tuple(findings), leftovers=leftovers),
    )


def with_remedies(store: Store, check: RunCheck) -> RunCheck:
    """The same with what to do about each finding; asks the storage for names."""
    whole = [commit.name for commit in check.commits if commit.counts and not commit.findings and not commit.is_gone]
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
        remedy = remedy_of_commit(location=check.location, is_head=commit.is_head, counts=commit.counts, whole=whole)
        return replace(commit, findings=tuple(replace(finding, remedy=remedy) for finding in commit.findings))

    # The chain's findings name a commit but are of the run: a way back is shorter, which stops nobody.
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


def render(check: RunCheck) -> str:
    """Text of a check, ready to print."""
    rows = [("commit", "files", "size", "state")]
    rows += [_commit_line(commit) for commit in check.commits]
    parts = [f"Run in {check.location}", columns(rows) if check.commits else "No commits"]
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


def _check_record(store: Store) -> tuple[RunRecord | None, list[Finding]]:
    try:
        return read_run(store), []
    except (NameNotFound, DocumentRefused) as error:
        return None, [_of_run(_damage(RUN_FILE, error, "the run's record"), "what the run is")]


def _check_lineage(store: Store) -> tuple[tuple[str, ...], list[Finding]]:
    try:
        return read_lineage(store), []
    except (NameNotFound, DocumentRefused) as error:
        file = getattr(error, "name", "lease")
        return read_lineage(store, rebuild=True), [
            _of_run(_damage(file, error, "bases that lead from commit to commit"), "which commits count")
        ]
    except ValueError as error:  # A base that names a newer commit.
        damage = Damage(name="lease", found=str(error), expected="bases that lead from commit to commit")
        return (), [_of_run(damage, "which commits count")]


def _check_policies(store: Store) -> list[Finding]:
    """Looks at the newest record, the only one that anybody reads."""
    try:
        read_policies(store)
    except (NameNotFound, DocumentRefused) as error:
        return [_of_run(_damage(getattr(error, "name", FOLDER), error, "which commits are kept"), "the keep policies")]
    return []


def _check_history(store: Store) -> list[Finding]:
    """Looks at the newest record, the only one that anybody reads."""
    try:
        read_history(store)
    except (NameNotFound, DocumentRefused) as error:
        return [_of_run(_damage(getattr(error, "name", HISTORY_FOLDER), error, "a record"), "loss and evaluations")]
    return []


def _check_settings(store: Store) -> list[Finding]:
    try:
        read_settings(store)
    except (NameNotFound, DocumentRefused) as error:
        return [
            _of_run(_damage(getattr(error, "name", SETTINGS_FOLDER), error, "a record"), "changed arguments of the job")
        ]
    return []


def _require(store: Store, name: str) -> None:
    """Refuses a name that nobody published; a damaged manifest is for the check."""
    if name not in read_commit_names(store):
        load_named(store, name)


def _check_commit(
    store: Store, name: str, lineage: tuple[str, ...], record: RunRecord | None, *, was_published: bool
) -> CheckedCommit:
    findings: list[Finding] = []
    num_files = num_bytes = 0
    try:
        manifest = checkpoint.load(store, name)
    except (NameNotFound, DocumentRefused) as error:
        damage = _damage(commit_file(name), error, "the manifest")
        findings.append(_finding(name, damage, "the list of all files of the commit"))
    else:
        result = verify(store, manifest)
        num_files, num_bytes = result.num_files, result.num_bytes
        place_of = _places(manifest) if result.damages else {}
        findings += [_finding(name, damage, place_of.get(damage.name, "")) for damage in result.damages]
        findings += _mismatches(manifest, record)
    is_gone = bool(findings) and was_published and name not in read_commit_names(store)
    return CheckedCommit(
        name=name,
        counts=name in lineage,
        is_head=name in lineage[:1],
        is_gone=is_gone,
        num_files=num_files,
        num_bytes=num_bytes,
        findings=() if is_gone else tuple(findings),
    )


def _places(manifest: Manifest) -> dict[str, str]:
    """File → what it holds."""
    listed = {commit_file(manifest.name): "the list of all files of the commit"}
    return listed | places_of(manifest.tables, manifest.dense)


def places_of(tables: Iterable[TableFiles], dense: Iterable[DenseFile]) -> dict[str, str]:
    """File of a table or a dense array → what it holds."""
    places: dict[str, str] = {}
    for table in tables:
        for array in table.arrays:
            places[f"{array.path}/zarr.json"] = f"table '{table.name}', {array.name}, shape of all buckets"
        for chunk in table.chunks:
            places[chunk.name] = describe_bucket(table, chunk.array, chunk.bucket)
        for delta in table.deltas:
            for part in delta.parts:
                for file in part.files:
                    for name in file.file_sizes():
                        places[name] = describe_changes(table, delta, part, name)
    for leaf in dense:
        places[f"{leaf.path}/zarr.json"] = f"dense '{leaf.key}', shape"
        places[leaf.chunk_file] = f"dense '{leaf.key}'"
    return places


def _mismatches(manifest: Manifest, record: RunRecord | None) -> Iterator[Finding]:
    """Where a commit is good in itself but not one of this run."""
    file = commit_file(manifest.name)
    if record is None:
        return
    if manifest.run_id != record.run_id:
        damage = Damage(name=file, found=f"run {manifest.run_id}", expected=f"{record.run_id} as in {RUN_FILE}")
        yield _finding(manifest.name, damage, "whose commit it is")
    found = {
        table.name: (table.num_rows, table.dim, table.num_buckets, {slot.name: slot.width for slot in table.slots})
        for table in manifest.tables
    }
    expected = {
        table.name: (table.num_rows, table.dim, table.num_buckets, dict(table.slots)) for table in record.tables
    }
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            damage = Damage(
                name=file,
                found=f"(rows, dim, buckets, slots) {found.get(name, 'missing')}",
                expected=f"{expected.get(name, 'no such table')} as in {RUN_FILE}",
            )
            yield _finding(manifest.name, damage, f"table '{name}'")


def _chain_findings(
    store: Store, lineage: tuple[str, ...], *, seen: set[str], leftovers: tuple[Leftover, ...]
) -> list[Finding]:
    """Each commit's parent must be the one before it in the lineage, or lie between the two and have been, or be,
    deleted by the keep policy.

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
        findings.append(_finding(name, damage, "the chain of commits"))
    return findings


def _is_between(before: str | None, parent: str | None, name: str) -> bool:
    """Whether a commit that is gone may have been between two of the lineage. Steps rise along it, generations at equal
    steps.
    """
    first, middle, last = (parse_commit_name(commit or "") for commit in (before, parent, name))
    return first is not None and middle is not None and last is not None and first < middle < last


def _damage(file: str, error: Exception, expected: str) -> Damage:
    if isinstance(error, DocumentRefused):
        return Damage(name=error.name, found=error.found, expected=error.expected)
    if isinstance(error, NameNotFound):
        return Damage(name=error.name, found="no file", expected=expected)
    return Damage(name=file, found=str(error), expected=expected)


def _of_run(damage: Damage, place: str) -> Finding:
    return Finding(commit=None, file=damage.name, place=place, found=damage.found, expected=damage.expected)


def _finding(commit: str, damage: Damage, place: str) -> Finding:
    return Finding(commit=commit, file=damage.name, place=place, found=damage.found, expected=damage.expected)


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
