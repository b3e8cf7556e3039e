"""Deleting old commits and leftovers by hand, under a lease of its own, so that never two programs write to a run."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Callable, Sequence

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.keep_policies import KeepPolicy
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.orchestrator.commit.keep import MIN_KEPT, Removal, keep_latest
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.writable_store import open_for_writing
from podembed.orchestrator.run.policy_record import read_policies
from podembed.orchestrator.run.reference import open_run_store
from podembed.serving.publish.tidying import tidy
from podembed.tools.inspect.forget import holders, wanted_keys
from podembed.workers.storage.store import Store


def prune(
    url: str,
    *,
    num_to_keep: int | None,
    also: Sequence[KeepPolicy] | None = None,
    holding: Sequence[str] = (),
    single_writer: bool = False,
    unix_s: Callable[[], float] = time.time,
) -> Removal:
    """Keeps the newest commits of a run and deletes what they do not need, attempts that were never finished included.

    Claims the next generation: a driver that has been silent for longer than its heartbeat's life is fenced by that, as
    `resume` would.

    Args:
      num_to_keep: commits; at least 2. None keeps all but those of `holding`.
      also: further reasons to keep a commit; None for those of the run's last driver.
      holding: a table and some of its keys, as `forget` takes them. Commits that hold one of them go, whatever would
        keep them.
      single_writer: accept a storage that cannot keep a driver out while this goes on.
      unix_s: the wall clock, for heartbeats and the age of half-written files.

    Raises:
      ConfigurationError: no run, fewer than 2 to keep, or the newest commit holds a key; or a driver went on while
        files were searched for keys.
      RunIsHeld: a driver is at work.
      DocumentRefused: the record of the run's policies is damaged, and others were not given.
      NoLoadableCommit: the newest commit is damaged; nothing is deleted, as an older one may be needed.
    """
    if num_to_keep is not None and num_to_keep < MIN_KEPT:
        raise ConfigurationError(
            f"Found --keep {num_to_keep}. Expected at least {MIN_KEPT}, so that a damaged commit has an ancestor. Keep "
            "more."
        )
    store = open_run_store(url)
    if also is None:
        recorded = read_policies(store)
        also = recorded.config.keep_policies if recorded else ()
    open_for_writing(url, single_writer=single_writer)
    lineage = read_lineage(store)
    if not lineage:
        # Nothing that counts: an attempt may be the first commit of a driver that is just starting.
        return Removal(commits=(), attempts=(), num_files=0, num_bytes=0)

    def check(newest: str | None) -> str | None:
        return checkpoint.newest_loadable(store, newest, allow_ancestors=False, on_skip=lambda name, why: None)

    without = _holders(store, lineage, holding)
    # Before the claim too: a run that cannot be pruned should not lose a generation to the attempt.
    check(lineage[0])
    holder = Holder.current(f"prune-{uuid.uuid4().hex[:12]}")
    lease = acquire(store, holder=holder, choose_base=check, unix_s=unix_s)
    try:
        if holding and lease.head != lineage[0]:
            # A driver began and ended meanwhile. What it committed was not searched, and may need what holds a key.
            raise ConfigurationError(
                f"Found commit {lease.head} to go on from, made or chosen while files up to {lineage[0]} were searched "
                "for the keys. Expected a run at rest; nothing was deleted. Try again."
            )
        most = max(MIN_KEPT, len(lineage)) if num_to_keep is None else num_to_keep
        removal = keep_latest(store, lease, num_to_keep=most, also=also, without=without, unix_s=unix_s)
        tidy(store, now_unix_s=unix_s())
        return removal
    finally:
        lease.release()


def _holders(store: Store, lineage: Sequence[str], holding: Sequence[str]) -> tuple[str, ...]:
    if not holding:
        return ()
    table, *keys = holding
    found = holders(store, lineage, table, wanted_keys(store, table, keys))
    if lineage[0] in found:
        raise ConfigurationError(
            f"Found one of the keys {', '.join(keys)[:200]} of table '{table}' in the newest commit {lineage[0]}. "
            f"Expected older ones alone, since the newest is never deleted. Run first: "
            f"{shlex.join(['podembed', 'forget', store.location, table, *keys])}"
        )
    return found
