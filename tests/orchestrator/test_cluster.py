"""`RayBackend` where it needs no cluster: what follows when there is no room for the hosts."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.cluster import RayBackend
from orchestrator.config import ConfigurationError, ScalingConfig
from orchestrator.errors import WorkerFailure, is_host_fault


def test_room_that_was_taken_in_the_middle_of_a_run_is_waited_for_and_a_first_start_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the look at the cluster and Ray's placement somebody else may be quicker; no setting mends that."""

    def refuse(*_: Any) -> Any:
        raise ConfigurationError("The cluster did not give 2 hosts.")

    backend = RayBackend(ScalingConfig(num_hosts=2, resources_per_host={"CPU": 1}), lambda text: None)
    monkeypatch.setattr(backend, "_granted", refuse)
    monkeypatch.setattr(backend, "_name_idle_accelerators", lambda bundle: None)
    with pytest.raises(ConfigurationError):
        backend.launch(2, lambda: None)
    backend.placed = {0: "a", 1: "b"}
    with pytest.raises(WorkerFailure, match="did not give 2 hosts") as caught:
        backend.launch(2, lambda: None)
    assert is_host_fault(caught.value.failures)
