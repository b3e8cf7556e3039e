"""What should not be in how shards were restored is said, with who it was."""

from __future__ import annotations

from podembed.orchestrator.driver.recovery import restore_alarms
from podembed.orchestrator.events.machines import BucketsRefused, MemoryWrong
from podembed.workers.host.survivors.surviving_shard import Restored
from tests.sentences import sentences


def test_nothing_is_said_where_all_is_well() -> None:
    assert restore_alarms([Restored(buckets_kept=3, buckets_moved=2, buckets_read=1), Restored()]) == []


def test_wrong_and_refused_buckets_are_counted_over_all_hosts() -> None:
    alarms = restore_alarms([Restored(buckets_wrong=1), Restored(buckets_refused=2), Restored(buckets_refused=1)])
    assert alarms == [MemoryWrong(buckets=1), BucketsRefused(buckets=3, hosts=(1, 2))]
    wrong, refused = sentences(alarms)
    assert wrong.startswith("1 buckets of hosts that lived on did not have the digests of the commit")
    assert refused.startswith("3 buckets that hosts sent to host 1, 2 did not come or did not have the digests")
    assert "read from its files" in refused
