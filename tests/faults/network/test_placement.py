"""Hosts that live on keep their machines, and new ones get machines of their own, while machines come and vanish."""

from __future__ import annotations

import pytest

from tests.long_tests import is_long
from tests.processes import said_by

TIMEOUT_S = 900


@is_long
@pytest.mark.ray
@pytest.mark.slow
def test_hosts_that_live_on_keep_their_machines_and_others_get_their_own() -> None:
    said = said_by("tests.faults.network.placement_process", timeout_s=TIMEOUT_S)
    first, grown, replaced, shrunk = said["seen"]
    one, other = first["on"]
    assert {one, other} == {"a", "b"}

    assert grown["on"] == [one, other, "c"]
    assert grown["hosts"][:2] == first["hosts"]

    assert said["fit"] == [1, 2], "a machine whose daemon is gone is of no use, whether Ray knows or not"
    assert replaced["on"] == ["d", other, "c"]
    assert replaced["hosts"][1:] == grown["hosts"][1:]
    assert replaced["hosts"][0] != grown["hosts"][0]

    assert said["still_fit"] == [0, 2]
    assert shrunk["on"] == ["d", "c"]
    assert shrunk["hosts"] == [replaced["hosts"][0], replaced["hosts"][2]]
    assert shrunk["held"] == ["c", "d"], "what no host uses is given back, the bundle of the lost machine with it"
