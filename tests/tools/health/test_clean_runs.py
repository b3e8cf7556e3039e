"""No alarm on clean runs, on whatever machine this is: small data and jobs that differ in seed, size and overlap. One
in the default run, 24 as a long test; each looks at its run's stream with the driver's own thresholds.
"""

from __future__ import annotations

from pathlib import Path
from time import time

import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.tools.health.check import check_health, render
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.small_job import write_small_data
from tests.tools.health.test_real_runs import Heard
from tests.training import fit_job

OPTIONS: tuple[dict[str, object], ...] = ({"staleness": 0}, {"staleness": 1}, {"overlap": False, "cut_bags": True})


def check_clean(where: Path, *, seed: int, epochs: int, options: dict[str, object]) -> None:
    num_rows = 1900 + 700 * seed
    write_small_data(where / "data", num_rows=num_rows, seed=seed)
    given = {"folder": str(where / "data"), "num_rows": num_rows, "audit": False, "epochs": epochs, "seed": seed}
    heard = Heard()
    fit_job(
        JobReference(function="tests.small_job:small_job", arguments=given | {"evaluate": seed % 2 == 0} | options),
        where,
        checkpoint_config=CheckpointConfig(every_steps=100),
        reporter=heard,
    )
    health = check_health(Store(str(where / "run")), now_unix_s=time())
    assert [one for one in heard.alarms if not one.is_note] == [], render(health)
    assert health.is_healthy, render(health)
    assert [began for began, _ in health.over if not began.is_note] == []


def test_a_clean_run_has_no_alarm(tmp_path: Path) -> None:
    check_clean(tmp_path, seed=3, epochs=8, options=OPTIONS[1])


@is_long
@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "stale", "cut"])
@pytest.mark.parametrize("seed", range(8))
def test_clean_runs_have_no_alarm(tmp_path: Path, seed: int, options: dict[str, object]) -> None:
    check_clean(tmp_path, seed=seed, epochs=25, options=options)
