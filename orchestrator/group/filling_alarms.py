"""What should not be in how the shards of a generation were filled, in words."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.workers.host.surviving_shard import Filled


def filling_alarms(filled: Sequence[Filled]) -> list[str]:
    """A line for each thing that should not be.

    Args:
      filled: one a host.
    """
    alarms = []
    if wrong := sum(one.buckets_wrong for one in filled):
        alarms.append(
            f"{wrong} buckets of hosts that lived on did not have the digests of the commit after going back to it in "
            "memory, and were read "
            "from its files. Expected none. Look for a host with faulty memory, and report it if it comes again"
        )
    if refused := sum(one.buckets_refused for one in filled):
        receivers = ", ".join(str(host) for host, one in enumerate(filled) if one.buckets_refused)
        alarms.append(
            f"{refused} buckets that hosts sent to host {receivers} did not come or did not have the digests of the "
            "commit, and were read from "
            "its files. Expected none. Look for a host with faulty memory or a faulty network, and report it if it "
            "comes again"
        )
    return alarms
