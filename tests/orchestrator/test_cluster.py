"""`RayBackend` where it needs no cluster: what follows when there is no room for the hosts."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.cluster import RayBackend, RayCall, RayHandle
from orchestrator.config import ConfigurationError, ScalingConfig
from orchestrator.errors import Failure, FailureKind, WorkerFailure, is_host_fault


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


def test_calls_to_a_cluster_that_ended_fail_at_once_and_ray_is_not_asked() -> None:
    """With its head gone a call of Ray does not come back for a minute, and then the driver is ended from within."""
    backend = RayBackend(ScalingConfig(num_hosts=1), lambda text: None, lost=lambda: "gcs_server")
    # Neither reference nor actor is one of Ray's: to give them to it would be an error.
    call = RayCall("host 0", object(), RayHandle("host 0", object()))
    assert backend.settled([call], timeout_s=60.0) == ([call], [])
    failure = backend.result(call)
    assert isinstance(failure, Failure)
    assert (failure.worker, failure.kind) == ("host 0", FailureKind.DIED)
    assert "gcs_server of Ray ended" in failure.message
    assert is_host_fault([failure])
    assert backend.fit([]) == frozenset()
    backend.forget()
