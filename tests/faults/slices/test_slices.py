"""Two pretended TPU slices of two machines each: one machine is lost, and the run goes on with the other slice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.long_tests import is_long
from tests.orchestrator.driver.test_equality import expected_audit
from tests.processes import said_by
from tests.run_state import committed_state
from tests.small_job import small_job

TIMEOUT_S = 900
pytestmark = is_long  # a cluster of five nodes takes most of a minute


@pytest.mark.ray
@pytest.mark.slow
def test_a_lost_machine_costs_its_slice_and_the_other_one_keeps_its_rows(small_data: str, tmp_path: Path) -> None:
    seen = said_by(
        "tests.faults.slices.slices_process", small_data, str(tmp_path), "2x2x2", "TPU-V4", "alone", timeout_s=TIMEOUT_S
    )
    assert seen["hosts"] == [4, 2], seen["events"]
    (recovery,) = seen["recoveries"]
    cause, survivors, kept, read, _ = recovery
    assert survivors == 2, cause
    # The hosts of the other slice hold what they held before, without having read any of it.
    assert kept == seen["own"] > 0
    assert read > 0, "what the lost slice held"

    before, after = seen["variables"]
    assert sorted((one["MEGASCALE_SLICE_ID"], one["MEGASCALE_NUM_SLICES"]) for one in before) == [
        ("0", "2"),
        ("0", "2"),
        ("1", "2"),
        ("1", "2"),
    ]
    assert [(one["MEGASCALE_SLICE_ID"], one["MEGASCALE_NUM_SLICES"]) for one in after] == [("0", "1")] * 2
    assert {one["JAX_PLATFORMS"] for one in [*before, *after]} == {"cpu"}
    assert seen["held"] == [
        {"head": ["CREATED"] * 2, "hosts": ["CREATED"] * 2},
        {"head": ["CREATED"], "hosts": ["CREATED"]},
    ]
    assert seen["left"] == {"head": [], "hosts": []}
    assert seen["seconds"] < 120.0  # on a busy machine; see docs/operations.md for what it takes

    audit = committed_state(seen["path"])["audit/rows"][:, 0]
    np.testing.assert_allclose(
        audit, expected_audit(small_job(folder=small_data, epochs=4000), seen["step"]), rtol=1e-5
    )
