"""`tidy`: deletes what past versions left behind, in a run or a copy."""

from __future__ import annotations

from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.published import (
    commit_of_version,
    forget_pointers,
    is_held,
    is_quiet,
    newest_number,
    pointer_numbers,
    read_pointer,
)
from podembed.serving.publish.versions import FILES, REFUSED, read_version, version_file, version_names
from podembed.workers.storage.store import Store

MOST_POINTERS = 1000
TIDY_EVERY = 50
"""Pointers: to read the newest thousand takes a while on an object store."""


def tidy(store: Store, *, now_unix_s: float) -> None:
    """Deletes the pointers before the newest thousand, the versions and refusals that none of these names and whose
    commit is gone, and then the files of versions that no version names.

    Does nothing while a publisher or a rollback is at work: it may be about to name what looks unneeded. What it makes
    meanwhile was not listed, so it stays. What lay here before may be named again; so before each file it looks whether
    somebody began. A publisher takes longer from there to its pointer than one operation here.

    Raises:
      StorageError: a pointer or a version is damaged, so what is needed is unknown; nothing is deleted.
    """
    if is_held(store, now_unix_s=now_unix_s):
        return
    since = newest_number(store)
    # Listed first: what comes later is not deleted.
    files, refused = store.children(FILES), store.children(REFUSED)
    named = {read_pointer(store, number).version for number in pointer_numbers(store)[-MOST_POINTERS:]}
    commits = set(read_commit_names(store))
    versions = version_names(store)
    kept = [name for name in versions if name in named or commit_of_version(name) in commits]
    needed = {file.sha256 for name in kept for file in read_version(store, name).files.values()}
    forget_pointers(store, keep=MOST_POINTERS)
    unneeded = [f"{REFUSED}/{file}" for file in refused if file.removesuffix(".json") not in kept]
    unneeded += [version_file(name) for name in versions if name not in kept]
    unneeded += [f"{FILES}/{sha256}" for sha256 in files if sha256 not in needed]
    for file in unneeded:
        if not is_quiet(store, since=since, now_unix_s=now_unix_s):
            return
        store.delete(file)
