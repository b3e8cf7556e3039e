"""A cluster that is not there: refused at once by a run that has not begun, waited for by one that has, with a deadline
and an ear for signals.
"""

from __future__ import annotations

import socket

import pytest

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import TooFewHosts
from podembed.orchestrator.api.signals import StoppedAtStart, StopSignals
from podembed.orchestrator.cluster.joining import await_cluster
from tests.clock import FakeClock
from tests.sentences import saying


def waited(answers: list[bool], *, timeout_s: float, stop: StopSignals | None = None) -> list[str]:
    """What was said while nobody listened for so many looks, or for ever."""
    notices: list[str] = []
    await_cluster(
        "head:6379",
        timeout_s=timeout_s,
        stop=stop or StopSignals(),
        emit=saying(notices),
        clock=FakeClock(),
        answers=lambda address: answers.pop(0) if answers else False,
    )
    return notices


def test_a_cluster_that_is_there_is_not_waited_for_and_one_that_comes_back_is() -> None:
    assert waited([True], timeout_s=0.0) == []
    (told,) = waited([False] * 40 + [True], timeout_s=600.0)
    assert "waiting for the Ray cluster at head:6379" in told
    assert "ends in 600 s" in told


def test_a_run_that_has_not_begun_refuses_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"no Ray cluster at head:6379.*unset RAY_ADDRESS"):
        waited([], timeout_s=0.0)


def test_the_wait_has_an_end_after_which_a_supervisor_tries_again() -> None:
    with pytest.raises(TooFewHosts, match=r"for 600 s.*podembed resume"):
        waited([], timeout_s=600.0)


def test_a_request_to_stop_ends_the_wait() -> None:
    stop = StopSignals()
    stop.request("SIGTERM")
    with pytest.raises(StoppedAtStart):
        waited([], timeout_s=600.0, stop=stop)


def test_real_addresses_are_tried_and_names_are_left_to_ray() -> None:
    def look(address: str) -> None:
        await_cluster(address, timeout_s=0.0, stop=StopSignals(), emit=lambda event: None)

    look("auto")
    look("ray://nowhere:10001")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        look(f"127.0.0.1:{port}")
    with pytest.raises(ConfigurationError):
        look(f"127.0.0.1:{port}")


def test_a_name_is_tried_at_all_its_addresses_and_a_port_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(address: str) -> None:
        await_cluster(address, timeout_s=0.0, stop=StopSignals(), emit=lambda event: None)

    with pytest.raises(ConfigurationError, match="99999"):
        look("127.0.0.1:99999")
    if not socket.has_ipv6:
        return
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        known = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
        ]
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: known)
        look(f"head:{port}")
