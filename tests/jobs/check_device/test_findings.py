"""When two results agree, and what a report says of a message."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from podembed.jobs.check_device.findings import AGREES, DIFFERS, FAILED, compared, without_names

GIVEN = np.asarray([[1.0, -4.0], [0.0, math.nan]], np.float32)


@pytest.mark.parametrize(
    ("ours", "state"),
    [
        (GIVEN, AGREES),
        (GIVEN * np.float32(1 + 9e-5), AGREES),
        (GIVEN * np.float32(1 + 2e-4), DIFFERS),
        (np.nan_to_num(GIVEN), DIFFERS),
        (np.where(GIVEN == 1, np.nan, GIVEN), DIFFERS),
        (np.where(GIVEN == 1, np.inf, GIVEN), DIFFERS),
        (GIVEN[:1], FAILED),
    ],
)
def test_values_differ_by_the_largest_of_their_array(ours: np.ndarray, state: str) -> None:
    small = {"small": np.zeros(3)}
    found = compared("one", "float32", {"rows": ours, **small}, {"rows": GIVEN, **small}, 1.0)
    assert found.state == state
    json.dumps(found.as_json(), allow_nan=False)
    if state == DIFFERS:
        assert found.figures["where"] == "rows"


def test_an_array_that_is_missing_is_told() -> None:
    assert "rows" in compared("one", "bits", {}, {"rows": GIVEN}, 1.0).sentence


def test_messages_name_nobody() -> None:
    text = "Found 3/4 of s3://bucket/one at 10.0.0.7:80 and [fe80::1]:99 on tpu-host-1 in ~/x; /a b by ann.\nmore"
    assert without_names(text, ["tpu-host-1", "ann", ""]) == (
        "Found 3/4 of <path> at <address> and <address> on <name> in <path>; <path> b by <name>."
    )
