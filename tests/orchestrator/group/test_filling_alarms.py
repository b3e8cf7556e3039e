"""What should not be in how shards were filled is said, with who it was."""

from __future__ import annotations

from podembed.orchestrator.group.filling_alarms import filling_alarms
from podembed.workers.host.surviving_shard import Filled


def test_nothing_is_said_where_all_is_well() -> None:
    assert filling_alarms([Filled(buckets_kept=3, buckets_moved=2, buckets_read=1), Filled()]) == []


def test_wrong_and_refused_buckets_are_counted_over_all_hosts() -> None:
    wrong, refused = filling_alarms([Filled(buckets_wrong=1), Filled(buckets_refused=2), Filled(buckets_refused=1)])
    assert wrong.startswith("1 buckets of hosts that lived on did not have the digests of the commit")
    assert refused.startswith("3 buckets that hosts sent to host 1, 2 did not come or did not have the digests")
    assert "read from its files" in refused
