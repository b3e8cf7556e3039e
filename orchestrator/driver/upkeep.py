"""`Upkeep`: what a driver does for the run's folder beside each commit. It looks whether what was committed is still
there, and deletes old commits.

The publishing thread calls this; what there is to report is kept until the driver's thread takes it. A commit is whole
by itself: its manifest names all of its files. The loss of an older one therefore stops nothing, but its owner should
hear of it while a copy may still exist.
"""

from __future__ import annotations

from collections.abc import Callable

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit.keep import keep_latest
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.manifest import Manifest, commit_file
from podembed.orchestrator.commit.run_record import RUN_FILE, RunRecord, read_run
from podembed.orchestrator.commit.vanished import RunVanished
from podembed.orchestrator.commit.verification import size_damages
from podembed.orchestrator.events.commits import CommitVanished, FilesVanished, OldCommitsKept, RecordRestored
from podembed.orchestrator.events.event import Event
from podembed.workers.storage.records import encode
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


class Upkeep:
    """See the module. Mutated: what is to be reported, and which commits were there after the last one."""

    def __init__(
        self, store: Store, record: RunRecord, config: CheckpointConfig, *, unix_s: Callable[[], float]
    ) -> None:
        self._store = store
        self._record = record
        self._config = config
        self._unix_s = unix_s
        self._known: set[str] = set()
        self._told: set[Event] = set()
        self._untold: list[Event] = []

    def take(self) -> list[Event]:
        """Events to report since the last call."""
        told, self._untold = self._untold, []
        return told

    def look(self, lease: Lease, parent: Manifest | None) -> None:
        """Looks, before a commit, whether the run and the commits before it are still there.

        Raises:
          Fenced, RunVanished: as `Lease.check`.
          RunVanished: another run lies here.
        """
        lease.check()
        self._restore_record()
        gone = {name for name in self._known if not self._store.exists(commit_file(name))}
        if parent is not None:
            if parent.name not in gone and not self._store.exists(commit_file(parent.name)):
                gone.add(parent.name)
            self._look_at_files(parent)
        for name in sorted(gone):
            self._once(CommitVanished(commit=name, file=commit_file(name)))
        self._known -= gone

    def clean(self, lease: Lease) -> None:
        """Carries out the keep policies after a commit. The commit stands already; a storage that does not delete is
        no reason to stop.
        """
        config = self._config
        try:
            if config.num_to_keep is not None:
                keep_latest(
                    self._store,
                    lease,
                    num_to_keep=config.num_to_keep,
                    also=config.keep_policies,
                    unix_s=self._unix_s,
                )
            self._known = set(read_commit_names(self._store))
        except RunVanished:
            raise
        except (StorageError, OSError) as error:
            self._untold.append(OldCommitsKept(reason=str(error)))

    def require(self, lease: Lease, head: Manifest | None) -> None:
        """Looks, at the end of a run, whether its last commit is still there. A storage that does not answer now is not
        asked again.

        Raises:
          Fenced, RunVanished: it is not.
        """
        try:
            lease.check()
            damage = next(size_damages(self._store, head), None) if head else None
            if head and not self._store.exists(commit_file(head.name)):
                raise RunVanished(commit_file(head.name), "no file", self._store)
        except RunVanished:
            raise
        except (StorageError, OSError):
            return
        if damage is not None:
            raise RunVanished(damage.name, f"{damage.found} instead of {damage.expected}", self._store)

    def _look_at_files(self, parent: Manifest) -> None:
        damages = [*size_damages(self._store, parent)]
        if not damages:
            return
        self._once(
            FilesVanished(
                commit=parent.name,
                num_damaged=len(damages),
                num_files=len(parent.file_sizes()),
                first=damages[0].name,
                found=damages[0].found,
                location=self._store.location,
            )
        )

    def _restore_record(self) -> None:
        """Writes `RUN.json` again where it is gone or damaged: it never changes, so every driver would write the
        same.
        """
        try:
            found = read_run(self._store)
        except NameNotFound:
            how = "removed"
        except DocumentRefused:
            how = "damaged"
            self._store.delete(RUN_FILE)
        else:
            if found.run_id != self._record.run_id:
                raise RunVanished(RUN_FILE, f"run {found.run_id[:60]}", self._store)
            return
        self._store.create_exclusive(RUN_FILE, encode(self._record))
        self._untold.append(RecordRestored(file=RUN_FILE, found=how))

    def _once(self, event: Event) -> None:
        # Every later save finds the same until it is mended.
        if event not in self._told:
            self._told.add(event)
            self._untold.append(event)
