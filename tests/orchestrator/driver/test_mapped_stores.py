"""A job whose rows lie in memory-mapped files: the bytes of one whose rows lie in memory, through a kill and on other
numbers of hosts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.orchestrator.api.result import Result
from tests.long_tests import is_long
from tests.orchestrator.driver.test_equality import Killer, train_small
from tests.run_state import assert_same_bytes, committed_state

MAPPED = "tests.embedding.table.stores.mapped_store:mapped_job"


def assert_equal(found: Result, expected: Result) -> None:
    assert found.losses.keys() == expected.losses.keys()
    assert all(found.losses[step] == loss for step, loss in expected.losses.items())
    assert_same_bytes(committed_state(found.path), committed_state(expected.path))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_host_alone_ends_with_the_same_bytes(dynamic: bool, small_data: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_hosts": 1, "in_process": True, "max_steps": 15, "dynamic": dynamic}
    expected = train_small(small_data, tmp_path, "ram", **options)
    assert_equal(train_small(small_data, tmp_path, "mapped", job=MAPPED, **options), expected)


# In make test, test_equality.py kills a host, and test_cut_tables.py has several hosts with rows in files.
@is_long
@pytest.mark.ray
def test_a_killed_run_ends_with_the_same_bytes(two_hosts: Result, small_data: str, tmp_path: Path) -> None:
    killer = Killer("HostActor", after_step=12, seed=6)
    found = train_small(small_data, tmp_path, "mapped", job=MAPPED, num_hosts=2, reporter=killer)
    assert killer.killed
    assert len(found.recoveries) == 1
    assert_equal(found, two_hosts)


# In make test, test_dynamic_tables.py goes on with another host. A store knows nothing of hosts.
@is_long
@pytest.mark.ray
def test_a_killed_run_that_goes_on_with_another_host_ends_with_the_same_bytes(
    ray_cluster: None, small_data: str, tmp_path: Path
) -> None:
    """Owners pool one of two cut tables, and rows of the other travel. Every third commit is whole."""
    killer = Killer("HostActor", after_step=12, seed=6)
    # Steps behind the kill, also where the first commit is slow.
    for num_hosts, max_steps in ((2, 40), (3, 50)):
        options: dict[str, Any] = {
            "num_hosts": num_hosts,
            "max_steps": max_steps,
            "full_every": 3,
            "cut_bags": True,
        }
        expected = train_small(small_data, tmp_path, "ram", **options)
        reporter = killer if num_hosts == 2 else None
        found = train_small(small_data, tmp_path, "mapped", job=MAPPED, reporter=reporter, **options)
        assert_equal(found, expected)
        assert len(found.recoveries) == (1 if num_hosts == 2 else 0)
    assert killer.killed
    assert np.isfinite([*found.losses.values()]).all()
