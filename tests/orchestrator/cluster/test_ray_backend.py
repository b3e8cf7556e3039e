"""`RayBackend` where it needs no cluster: what follows when there is no room for the hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.api.run_errors import Failure, FailureKind, TooFewHosts, WorkerFailure, is_host_fault
from podembed.orchestrator.cluster.connection import Connection
from podembed.orchestrator.cluster.places import Reservation
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.cluster.ray_calls import RayCall, RayHandle
from podembed.orchestrator.cluster.ray_nodes import RayNodes
from podembed.orchestrator.group.worker_group import HostHandles
from podembed.workers.liveness.worker import Worker


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
    backend = RayBackend(
        ScalingConfig(num_hosts=1), lambda text: None, lost=lambda: "gcs_server of Ray ended on this machine"
    )
    # Neither reference nor actor is one of Ray's: to give them to it would be an error.
    call = RayCall(Worker("host", 0), object(), RayHandle(Worker("host", 0), object()), "train")
    assert backend.settled([call], timeout_s=60.0) == ([call], [])
    failure = backend.result(call)
    assert isinstance(failure, Failure)
    assert (failure.worker, failure.kind) == (Worker("host", 0), FailureKind.DIED)
    assert "gcs_server of Ray ended" in failure.message
    assert is_host_fault([failure])
    assert backend.fit([]) == frozenset()
    backend.forget()


def test_without_a_head_nothing_is_given_back_and_no_actor_is_killed_through_it() -> None:
    """Ray would wait for a minute with each placement group, and end the driver before it is through."""
    backend = RayBackend(ScalingConfig(num_hosts=1), lambda text: None, answers=lambda: False)
    host, device = _Actor(1), _Actor(2)
    pairs = [HostHandles(RayHandle(Worker("host", 0), host), RayHandle(Worker("device", 0), device))]
    # Neither groups nor actors are those of Ray: to give them to it would be an error.
    backend._reservations[id(pairs)] = Reservation([object()], [], {}, [])
    backend._marks.update({host._actor_id: "mark of nobody", device._actor_id: "mark of nobody else"})
    backend.stop(pairs)
    assert backend._reservations == backend._marks == {}


@dataclass(frozen=True)
class _Actor:
    _actor_id: int


class _Headless(Connection):
    """To a cluster of others without its head."""

    def lost(self) -> str | None:
        return None

    def answers(self) -> bool:
        return False

    def require(self) -> None:
        raise TooFewHosts("Ray's head has taken no connection for 10 s.")


def test_a_cluster_without_its_head_is_not_looked_at_and_no_generation_begins_there() -> None:
    scaling = ScalingConfig(num_hosts=1)
    nodes = RayNodes(RayBackend(scaling, print), scaling, connection=_Headless(), emit=print)
    assert nodes.look() is None
    assert nodes.killed_for_memory({Worker("host", 0)}) == set()
    nodes.unask()
    with pytest.raises(TooFewHosts):
        nodes.rules()
