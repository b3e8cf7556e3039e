"""`Claims`: the leases of one driver on a run, one after another, and what is written down when one begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.manifest import Manifest, commit_file, parse_commit_name
from podembed.orchestrator.commit.storage_wait import at_once
from podembed.orchestrator.events.commits import CommitLost, CommitPassedOver
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.run import (
    DataFilesChanged,
    InputRecordRewritten,
    MeaningRecorded,
    SettingsChanged,
    VersionsDiffer,
)
from podembed.orchestrator.run.input_record import (
    CHANGES_FOLDER,
    INPUT_FILE,
    check_order,
    read_input,
    record_change,
    shortened,
    write_input_again,
)
from podembed.orchestrator.run.job_settings import record_settings
from podembed.orchestrator.run.manifest_of_save import versions
from podembed.orchestrator.run.policy_record import record_policies
from podembed.orchestrator.run.run import OpenRun


class Claims:
    """See the module. Mutated by `acquire`: the lease, and the changes that are still to be recorded.

    Args:
      policies: recorded with each generation, so that a resumed run keeps the same commits.
      unix_s: wall clock.

    Attributes:
      lease: the newest one; None before the first.
    """

    def __init__(self, run: OpenRun, policies: CheckpointConfig, *, emit: Emit, unix_s: Callable[[], float]) -> None:
        self.lease: Lease | None = None
        self._run = run
        self._policies = policies
        self._emit = emit
        self._unix_s = unix_s
        self._input_changes = run.input_changes
        self._settings_before = run.settings_before

    @property
    def generation(self) -> int:
        """The generation of the newest lease, 0 before the first."""
        return self.lease.generation if self.lease is not None else 0

    def acquire(self, patiently: Callable[[Callable[[], Any]], Any] = at_once) -> Lease:
        """Claims the next generation.

        Args:
          patiently: asks the storage; may ask again if it is away.

        Raises:
          RunIsHeld, Fenced: another driver is at work.
          RunVanished: what this driver wrote for the generation before is gone.
          InputChanged: the commit to start from stands at a step that means other rows with the files as they are now.
        """
        passed: set[str] = set()

        def pass_over(name: str, reason: str) -> None:
            passed.add(name)
            self._emit(CommitPassedOver(commit=name, reason=reason))

        lease = acquire(
            self._run.store,
            holder=Holder.current(self._run.submission),
            take_over=self._run.take_over,
            held=self.generation,
            held_files=self.lease.own_files if self.lease else None,
            rebuild=self._run.allow_ancestor,
            patiently=patiently,
            unix_s=self._unix_s,
            choose_base=lambda newest: checkpoint.newest_loadable(
                self._run.store,
                newest,
                allow_ancestors=self._run.allow_ancestor,
                on_skip=pass_over,
                passes_vanished=self.lease is not None,
            ),
        )
        # Of a commit that was passed over it has been said what is wrong with it; its manifest may well be there.
        if self.lease is not None and self.lease.head not in (None, lease.head, *passed):
            self._tell_lost(self.lease.head, lease.head)
        self.lease = lease
        try:
            patiently(lambda: self._settle_input(lease.head_step))
            patiently(lambda: self._settle_settings(lease))
            patiently(partial(record_policies, self._run.store, self._policies, generation=lease.generation))
        except BaseException:
            lease.release_if_possible()
            raise
        return lease

    def _tell_lost(self, acknowledged: str, found: str | None) -> None:
        """Reports that the newest commit is older than the one that this driver made last, or began from, since the
        manifest of that is gone. A newer one is its own, whose answer was lost.
        """
        if found is None or (parse_commit_name(found) or (0, 0)) < (parse_commit_name(acknowledged) or (0, 0)):
            self._emit(CommitLost(commit=acknowledged, file=commit_file(acknowledged), now=found))

    def _settle_settings(self, lease: Lease) -> None:
        """Records changed arguments of the job, once."""
        run, step = self._run, lease.head_step
        if self._settings_before is None or run.reference is None:
            return
        after = run.reference.arguments
        record = record_settings(run.store, self._settings_before, after, generation=lease.generation, step=step)
        self._emit(SettingsChanged(step=step, changes=record.describe()))
        self._settings_before = None

    def _settle_input(self, step: int) -> None:
        """Checks that the run can go on at a step with its files, and records those that were accepted.

        Raises:
          InputChanged: the step stands for other rows now.
        """
        run, changed = self._run, self._input_changes
        known = read_input(run.store)
        if not changed and not known.accepted:
            is_lost = known.damaged or known.began is None
            if is_lost or known.meaning is None:
                # The files are those of the record's fingerprint, so what is written is what stood there.
                write_input_again(run.store, run.train_index, run.eval_index, run.meaning)
                self._emit(InputRecordRewritten(file=INPUT_FILE) if is_lost else MeaningRecorded(file=INPUT_FILE))
            return
        check_order(known, run.train_index, run.eval_index, run.input_plan, step=step)
        if changed:
            record_change(run.store, changed, run.train_index, run.eval_index, run.meaning, step=step)
            self._emit(DataFilesChanged(step=step, changes=changed, shown=shortened(changed)))
            self._input_changes = ()
        elif known.meaning is None and known.newest is not None:
            told = ("what the job makes of them is recorded for the first time",)
            record_change(run.store, told, run.train_index, run.eval_index, run.meaning, step=step)
            self._emit(MeaningRecorded(file=CHANGES_FOLDER))

    def load_base(self, lease: Lease) -> Manifest | None:
        """The commit that the lease starts from. Says so if other versions wrote it: results may then differ in their
        last bits.
        """
        base = checkpoint.load(self._run.store, lease.head) if lease.head else None
        now = versions()
        both = {name: (base.versions.get(name), now[name]) for name in now} if base else {}
        changed = {name: (was, version) for name, (was, version) in both.items() if was != version}
        if base is not None and changed:
            self._emit(VersionsDiffer(commit=base.name, versions=changed))
        return base
