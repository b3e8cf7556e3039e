"""Children measure, and one that fails is reported with its exit status."""

from __future__ import annotations

import os
import secrets

import pytest

from podembed.workers.calibration.exchange import SIZES_BYTES, wire_of
from podembed.workers.calibration.measure import MeasuringFailed, answers_of
from podembed.workers.calibration.reading import measure_reading


def test_two_children_exchange() -> None:
    token = secrets.token_hex(32)
    requests = [{"measure": "exchange", "rank": rank, "token": token} for rank in range(2)]
    one, other = answers_of(requests, dict(os.environ))
    assert len(one) == len(other) == len(SIZES_BYTES)
    wire = wire_of(one)
    assert 1e-6 < wire.message_s < 1.0
    assert 0.0 <= wire.byte_s < 1e-6


def test_a_child_that_fails_is_reported() -> None:
    with pytest.raises(MeasuringFailed, match="exit status 1 of a measuring process"):
        answers_of([{"measure": "nothing of the kind"}], dict(os.environ))


def test_a_byte_costs_what_large_messages_take_longer() -> None:
    wire = wire_of([1e-4, 0.0, 1e-4 + 1e-9 * SIZES_BYTES[2], 1e-4 + 1e-9 * SIZES_BYTES[3]])
    assert wire.seconds(messages=3, num_bytes=1e6) == pytest.approx(3e-4 + 1e-3)


def test_reading_costs_something_for_each_id() -> None:
    sample_s, id_s = measure_reading()
    assert 0 < id_s < 1e-5
    assert 0 <= sample_s < 1e-3
