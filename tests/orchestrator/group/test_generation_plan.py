"""Buckets stay with the hosts that hold them, also where these get other numbers."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.buckets import place
from podembed.orchestrator.group.generation_plan import renumbered
from podembed.orchestrator.group.survivors import who_goes_on


@pytest.mark.parametrize(
    ("alive", "num_before", "num_hosts", "expected"),
    [
        ({1, 2}, 3, 2, (-1, 1, 0)),
        ({0, 2}, 3, 3, (0, 1, 2)),
        ({0, 2}, 3, 2, (0, -1, 1)),
        ({0, 1}, 2, 4, (0, 1)),
        ({2}, 3, 1, (-1, -1, 0)),
    ],
)
def test_owners_by_their_new_numbers(
    alive: set[int], num_before: int, num_hosts: int, expected: tuple[int, ...]
) -> None:
    """Of a lost host with the number of a new process, that one is the owner: all others keep what they have."""
    kept = {
        rank: old
        for rank, old in enumerate(who_goes_on(frozenset(alive), num_before=num_before, num_hosts=num_hosts))
        if old is not None
    }
    owners = tuple(range(num_before)) * 2
    assert renumbered({"t": owners}, kept, num_hosts=num_hosts) == {"t": expected * 2}


@pytest.mark.parametrize(
    ("alive", "num_before", "most_read"), [({1, 2}, 3, 0.34), ({0, 2, 3}, 4, 0.26), ({2, 3, 4, 5, 6, 7}, 8, 0.26)]
)
def test_a_lost_host_costs_its_own_buckets_and_no_others(alive: set[int], num_before: int, most_read: float) -> None:
    num_hosts = len(alive)
    sizes = [np.full(960, 1 << 20, np.int64)]
    (owners,) = place(bucket_bytes=sizes, num_hosts=num_before)
    kept = {
        rank: old
        for rank, old in enumerate(who_goes_on(frozenset(alive), num_before=num_before, num_hosts=num_hosts))
        if old is not None
    }
    before = renumbered({"t": tuple(owners.tolist())}, kept, num_hosts=num_hosts)
    (now,) = place(bucket_bytes=sizes, num_hosts=num_hosts, previous=[np.array(before["t"], np.int32)])
    held = np.array([kept[owner] for owner in now])
    assert (held != owners).mean() <= most_read
