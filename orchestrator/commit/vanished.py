"""`RunVanished`: what a driver wrote is not in the run's folder any more.

Somebody removed it, or the disk with it is not mounted where it was. A driver that went on would train for nothing: no
driver can resume from what it writes into an empty folder. Files are opened by name: a listing may be old, and an old
listing must end no run.
"""

from __future__ import annotations

from collections.abc import Mapping

from podembed.workers.storage.records import read_document
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, unseal

_PARTS = ("RUN.json", "lease", "commit", "data")


class RunVanished(StorageError):
    """The run's folder, or the part of it that says whose run it is, is gone or holds another run."""

    may_pass = False

    def __init__(self, name: str, found: str, store: Store):
        super().__init__(
            f"Found {found} at '{name}' in {store.location}. Expected the file as this driver wrote it. Somebody "
            f"removed it, or the storage is not the one that was there: {what_is_left(store)}. Nothing more is "
            "committed there. If a disk was unmounted, mount it again; if files were removed, restore the folder from "
            "a copy; then resume. Without a copy begin a new run, from a commit if one is left (--warm-start "
            "RUN@COMMIT)."
        )
        self.name = name


def require_own(store: Store, own_files: Mapping[str, bytes]) -> None:
    """Looks for files that this driver created.

    Raises:
      RunVanished: one is gone, or is another driver's. One that is only damaged passes: it is ours, and `fsck` finds
        the damage.
    """
    for name, content in own_files.items():
        try:
            found = read_document(store, name, max_bytes=max(len(content), 1 << 14))
            if found != content:
                unseal(name, found)
                raise RunVanished(name, "a file of another driver", store)
        except NameNotFound:
            raise RunVanished(name, "no file", store) from None
        except DocumentRefused:
            continue


def what_is_left(store: Store) -> str:
    """The remaining parts of a run's folder, as text for people; asks the storage."""
    try:
        left = [part for part in _PARTS if part in store.children()]
        num_commits = len([name for name in store.children("commit") if name.endswith(".json")])
    except (StorageError, OSError) as error:
        return f"the folder cannot be listed ({error})"
    return f"of the run there is left {', '.join(left) or 'nothing'}, with {num_commits} manifests in commit/"
