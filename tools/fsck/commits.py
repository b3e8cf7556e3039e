"""Checking one commit: its manifest, every byte of its files, and whether it is one of this run."""

from __future__ import annotations

from collections.abc import Iterator

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.manifest import Manifest, commit_file
from podembed.orchestrator.commit.run_record import RUN_FILE, RunRecord
from podembed.orchestrator.commit.verification import Damage, verify
from podembed.tools.fsck.findings import CheckedCommit, Finding, damage_of, finding_of_commit
from podembed.tools.fsck.places import places_of
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


def check_commit(
    store: Store, name: str, lineage: tuple[str, ...], record: RunRecord | None, *, was_published: bool
) -> CheckedCommit:
    """Reads every byte of one commit.

    Args:
      record: None where it cannot be read, and the commit is compared with nothing.
      was_published: whether its manifest was listed when the check began.
    """
    findings: list[Finding] = []
    num_files = num_bytes = 0
    try:
        manifest = checkpoint.load(store, name)
    except (NameNotFound, DocumentRefused) as error:
        damage = damage_of(commit_file(name), error, "the manifest")
        findings.append(finding_of_commit(name, damage, "the list of all files of the commit"))
    else:
        result = verify(store, manifest)
        num_files, num_bytes = result.num_files, result.num_bytes
        place_of = _places(manifest) if result.damages else {}
        findings += [finding_of_commit(name, damage, place_of.get(damage.name, "")) for damage in result.damages]
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


def _mismatches(manifest: Manifest, record: RunRecord | None) -> Iterator[Finding]:
    """Where a commit is good in itself but not one of this run."""
    file = commit_file(manifest.name)
    if record is None:
        return
    if manifest.run_id != record.run_id:
        damage = Damage(name=file, found=f"run {manifest.run_id}", expected=f"{record.run_id} as in {RUN_FILE}")
        yield finding_of_commit(manifest.name, damage, "whose commit it is")
    found = {
        table.name: (table.num_rows, table.dim, table.num_buckets, {slot.name: slot.width for slot in table.arrays[1:]})
        for table in manifest.tables
    }
    expected = {
        table.name: (table.num_rows, table.dim, table.num_buckets, dict(table.slots)) for table in record.tables
    }
    dynamic = {table.name for table in manifest.tables if table.is_dynamic}
    for name in sorted(found.keys() | expected.keys()):
        # A capacity may be raised on the way, which `RUN.json` does not say.
        is_larger = name in dynamic and name in expected and found[name][0] > expected[name][0]
        if found.get(name, ())[is_larger:] != expected.get(name, ())[is_larger:]:
            damage = Damage(
                name=file,
                found=f"(rows, dim, buckets, slots) {found.get(name, 'missing')}",
                expected=f"{expected.get(name, 'no such table')} as in {RUN_FILE}",
            )
            yield finding_of_commit(manifest.name, damage, f"table '{name}'")
