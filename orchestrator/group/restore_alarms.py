"""What should not be in how the shards of a generation were restored, as events."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.machines import BucketsRefused, MemoryWrong
from podembed.workers.host.survivors.surviving_shard import Restored


def restore_alarms(restored: Sequence[Restored]) -> list[Event]:
    """An event for each thing that should not be.

    Args:
      restored: one a host.
    """
    alarms: list[Event] = []
    if wrong := sum(one.buckets_wrong for one in restored):
        alarms.append(MemoryWrong(buckets=wrong))
    if refused := sum(one.buckets_refused for one in restored):
        receivers = tuple(host for host, one in enumerate(restored) if one.buckets_refused)
        alarms.append(BucketsRefused(buckets=refused, hosts=receivers))
    return alarms
