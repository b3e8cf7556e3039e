"""A run whose tables move between hosts, whole copies and parts, and between numbers of hosts and chips, with kills."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.long_tests import is_long
from tests.workers.device_tables.jobs import SIZES, assert_close, train, write_rows
from tests.workers.device_tables.test_runs import Killer

PLACES: dict[str, dict[str, Any]] = {
    "2 x 4": {"num_hosts": 2, "devices_per_host": 4, "sharded": [*SIZES]},
    "3 x 4": {"num_hosts": 3, "devices_per_host": 4, "sharded": [*SIZES]},
    "1 x 8": {"in_process": False, "devices_per_host": 8, "sharded": [*SIZES]},
    "mixed": {"num_hosts": 2, "devices_per_host": 2, "sharded": ["many"], "on_devices": ["few"]},
    "hosts": {"num_hosts": 2},
}
NUM_STEPS = 20


@pytest.mark.ray
@is_long
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_run_goes_on_wherever_its_tables_lie(seed: int, tmp_path: Path, ray_cluster: None) -> None:
    """Each part of the run goes on from the commit of another. Each step has the same loss as in a run that never
    moved, so each sample is there once, also after a kill.
    """
    folder, dice = tmp_path / "rows", random.Random(seed)
    write_rows(folder)
    expected = train(folder, tmp_path, "alone", max_steps=NUM_STEPS)
    ends = [*sorted(dice.sample(range(6, NUM_STEPS - 3), 2)), NUM_STEPS]
    killer = Killer(dice.choice(["HostActor", "DeviceActor"]))
    # A kill needs a commit before and a window behind.
    killed, losses, found = dice.randrange(3), {}, None
    for number, (end, name) in enumerate(zip(ends, dice.sample([*PLACES], 3), strict=True)):
        reporter = killer if number == killed else None
        found = train(folder, tmp_path, "moved", max_steps=end, reporter=reporter, **PLACES[name])
        assert found.step == end
        losses |= found.losses
    assert found is not None
    assert len(killer.killed) == len(killer.recoveries) <= 1
    assert losses == pytest.approx(expected.losses, rel=2e-5)
    assert_close(found, expected)
