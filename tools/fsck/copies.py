"""Checking a copy for servers: every byte of what servers read, and what lies there besides."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.manifest import commit_file, parse_commit_name
from podembed.orchestrator.commit.published import (
    COPY_FILE,
    commit_of_version,
    newest_pointer,
    published_commits,
    read_copy,
)
from podembed.orchestrator.commit.verification import file_damages
from podembed.serving.served_files import served_files
from podembed.tools.fsck.findings import CheckedCommit, Finding, RunCheck, damage_of, finding_of_commit, finding_of_run
from podembed.tools.fsck.leftovers import Leftover
from podembed.tools.fsck.places import places_of
from podembed.tools.fsck.versions import version_findings
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


def check_copy(store: Store, *, commit: str | None, on_commit: Callable[[CheckedCommit], None]) -> RunCheck:
    """Arguments and result are as for `check_run`. A commit counts if a kept version or a pin needs it.

    Raises:
      ConfigurationError: there is no commit of this name.
    """
    findings: list[Finding] = []
    source = "RUN"
    try:
        source = read_copy(store).source
    except (NameNotFound, DocumentRefused) as error:
        findings.append(finding_of_run(damage_of(COPY_FILE, error, "its record"), "which run this is a copy of"))
    names = sorted(read_commit_names(store), reverse=True)
    if commit is not None and commit not in names:
        raise ConfigurationError(
            f"Found no commit '{commit[:60]}' in {store.location}. Expected one of "
            f"{', '.join(names) or 'none'}. Name it."
        )
    if commit is not None:
        names = [commit]
    else:
        findings += version_findings(store)
    try:
        kept, pointer = published_commits(store), newest_pointer(store)
        head = commit_of_version(pointer.version) if pointer is not None else None
    except DocumentRefused:
        kept, head = set(names), None  # A finding of its own.
    checked = []
    for name in names:
        checked.append(_check_commit(store, name, counts=name in kept, is_head=name == head, source=source))
        on_commit(checked[-1])
    findings = [replace(finding, remedy=_remedy(store, finding.file, source, None)) for finding in findings]
    leftovers = _leftovers(store) if commit is None else ()
    return RunCheck(
        location=store.location, commits=tuple(checked), findings=tuple(findings), leftovers=leftovers, is_copy=True
    )


def _check_commit(store: Store, name: str, *, counts: bool, is_head: bool, source: str) -> CheckedCommit:
    findings: list[Finding] = []
    sizes: dict[str, int] = {}
    try:
        manifest = served_files(checkpoint.load(store, name))
    except (NameNotFound, DocumentRefused) as error:
        damage = damage_of(commit_file(name), error, "the manifest")
        findings.append(finding_of_commit(name, damage, "the list of all files of the commit"))
    else:
        sizes = manifest.file_sizes()
        damages = [*file_damages(store, manifest.tables, manifest.dense, has_digests=False)]
        place_of = places_of(manifest.tables, manifest.dense) if damages else {}
        findings += [finding_of_commit(name, damage, place_of.get(damage.name, "")) for damage in damages]
    is_gone = bool(findings) and name not in read_commit_names(store)
    return CheckedCommit(
        name=name,
        counts=counts,
        is_head=is_head,
        is_gone=is_gone,
        num_files=len(sizes),
        num_bytes=sum(sizes.values()),
        findings=()
        if is_gone
        else tuple(replace(one, remedy=_remedy(store, one.file, source, name)) for one in findings),
    )


def _remedy(store: Store, file: str, source: str, commit: str | None) -> str:
    to = f"--to {shlex.quote(store.location)}"
    if file == COPY_FILE:
        return f"delete the file; podembed publish {shlex.quote(source)} {to} writes it again"
    if commit is None:
        return f"servers go on with the version that they have; podembed publish {shlex.quote(source)} {to} offers one"
    return (
        f"delete the file; podembed publish {shlex.quote(f'{source}@{commit}')} {to} copies it again if the run still "
        "has the commit. Servers that have the version in memory go on with it"
    )


def _leftovers(store: Store) -> tuple[Leftover, ...]:
    """Files below `data/` that no commit needs."""
    sizes = store.sizes("data")
    needed: set[str] = set()
    for name in read_commit_names(store):
        try:
            needed |= served_files(checkpoint.load(store, name)).file_sizes().keys()
        except StorageError:
            return ()  # What it needs is unknown.
    count: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for name, size_bytes in sizes.items():
        if name not in needed:
            folder = "/".join(name.split("/")[:2])
            count[folder] += 1
            num_bytes[folder] += size_bytes
    return tuple(
        Leftover(path=folder, what=_what(folder), num_files=count[folder], num_bytes=num_bytes[folder])
        for folder in sorted(count)
    )


def _what(folder: str) -> str:
    if parse_commit_name(folder.removeprefix("data/")) is None:
        return "files of nobody that writes copies"
    return "files that no commit here needs; the next podembed publish --to deletes them"
