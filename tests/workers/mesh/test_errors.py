"""Errors keep their fields on the way to the driver and say found, expected and remedy."""

from __future__ import annotations

import pickle

import pytest

from podembed.workers.mesh import mesh_errors

_ERRORS = [
    mesh_errors.MeshConnectTimeout([2, 5], 3.0, {2: "dialing failed, Connection refused"}),
    mesh_errors.HandshakeRefused(3, "found the older generation 6, expected 7"),
    mesh_errors.HandshakeRefused(-1, "found b'GET / HT' as first bytes", True),
    mesh_errors.PeerLost(4, "the connection closed"),
    mesh_errors.PeerLost(4, "it left because of rank 1", 1),
    mesh_errors.ExchangeTimeout(2, 17, [1, 3], [3], 30.0),
    mesh_errors.MeshAborted("the driver fences generation 7"),
    mesh_errors.FrameError(1, "sequence", "5", "4"),
    mesh_errors.MeshBroken("It was closed."),
]


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_the_trip_through_ray(error: mesh_errors.MeshError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_sentences_name_the_hosts() -> None:
    assert "[2, 5]" in str(_ERRORS[0])
    assert "Connection refused" in str(_ERRORS[0])
    assert "blames rank 1" in str(_ERRORS[4])
    assert "[1, 3]" in str(_ERRORS[5])


def test_a_lost_peer_is_blamed_itself_unless_it_named_another() -> None:
    assert mesh_errors.PeerLost(4, "gone").blamed_rank == 4
    assert mesh_errors.PeerLost(4, "gone", 0).blamed_rank == 0
