"""The abort signal from other threads, early, late and repeatedly."""

from __future__ import annotations

import selectors
import threading

import pytest

from podembed.workers.mesh.active_exchange import AbortSignal
from podembed.workers.mesh.mesh_errors import MeshAborted
from tests.workers.mesh.mesh_testing import PATIENCE_S, in_threads, succeed


def test_a_waiting_selector_wakes_and_stays_awake() -> None:
    signal = AbortSignal()
    with selectors.DefaultSelector() as selector:
        selector.register(signal, selectors.EVENT_READ)
        signal.raise_if_requested()
        assert selector.select(0) == []
        threading.Timer(0.05, signal.request, args=["stop"]).start()
        for _ in range(2):
            assert selector.select(PATIENCE_S)
        with pytest.raises(MeshAborted, match="stop"):
            signal.raise_if_requested()
    signal.close()


def test_one_of_many_reasons_stands() -> None:
    signal = AbortSignal()
    succeed(in_threads([lambda index=index: signal.request(f"reason {index}") for index in range(8)]))
    reasons = set()
    for _ in range(2):
        with pytest.raises(MeshAborted) as caught:
            signal.raise_if_requested()
        reasons.add(caught.value.reason)
    assert len(reasons) == 1
    signal.close()


def test_requests_may_race_with_close() -> None:
    for _ in range(50):
        signal = AbortSignal()
        succeed(in_threads([lambda s=signal: s.request("late"), signal.close, signal.close]))
