"""The head of a cluster of others, by what takes connections: scripted with a fake clock, and a real socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import pytest

from podembed.orchestrator.api.run_errors import EXIT_TOO_FEW_HOSTS, TooFewHosts
from podembed.orchestrator.cluster.head_watch import IDLE_PATIENCE_S, LOOK_S, PATIENCE_S, HeadWatch
from tests.clock import FakeClock
from tests.sentences import saying

ADDRESS = "10.0.0.1:6379"


@dataclass
class Head:
    """A head that is up or not, a watch over it, and what was told."""

    clock: FakeClock = field(default_factory=FakeClock)
    is_up: bool = True
    tries: int = 0
    told: list[str] = field(default_factory=list)

    def takes(self, address: str) -> bool:
        assert address == ADDRESS
        self.tries += 1
        return self.is_up

    def watch(self) -> HeadWatch:
        return HeadWatch(ADDRESS, emit=saying(self.told), clock=self.clock, takes=self.takes)


def test_a_head_is_lost_only_after_a_while_of_silence_and_that_is_told_once() -> None:
    head = Head(is_up=False)
    watch = head.watch()
    for _ in range(int(PATIENCE_S)):
        assert watch.lost() is None
        head.clock.sleep(1.0)
    assert watch.lost() == f"Ray's head at {ADDRESS} has taken no connection for {PATIENCE_S:.0f} s"
    assert len(head.told) == 1
    assert f"{PATIENCE_S:.0f} s" in head.told[0]


def test_a_head_that_comes_back_has_its_whole_patience_again() -> None:
    head = Head(is_up=False)
    watch = head.watch()
    assert not watch.answers()
    head.clock.sleep(PATIENCE_S - 1.0)
    head.is_up = True
    assert watch.lost() is None
    head.is_up = False
    head.clock.sleep(PATIENCE_S - 1.0)
    assert watch.lost() is None
    assert [text.startswith(f"Ray's head at {ADDRESS} takes no connection") for text in head.told] == [
        True,
        False,
        True,
    ]
    head.clock.sleep(PATIENCE_S)
    assert watch.lost() is not None


def test_who_asks_often_does_not_connect_often() -> None:
    head = Head()
    watch = head.watch()
    for _ in range(100):
        assert watch.lost() is None
    assert head.tries == 1
    head.clock.sleep(LOOK_S)
    watch.lost()
    assert head.tries == 2


def test_between_generations_a_silent_head_is_waited_for_a_moment_and_then_the_run_ends_with_its_code() -> None:
    head = Head(is_up=False)
    began_s, waited = head.clock.now_s, []
    with pytest.raises(TooFewHosts, match="Expected the head of the cluster that the run has joined") as caught:
        head.watch().require(lambda: waited.append(head.clock.now_s))
    assert IDLE_PATIENCE_S <= head.clock.now_s - began_s <= IDLE_PATIENCE_S + LOOK_S
    assert caught.value.exit_code == EXIT_TOO_FEW_HOSTS
    assert waited


def test_one_that_is_back_in_time_is_used() -> None:
    head = Head(is_up=False)

    def back() -> None:
        head.is_up = True

    head.watch().require(back)
    assert head.told[-1] == f"Ray's head at {ADDRESS} takes connections again"


def test_a_socket_that_listens_answers_and_one_that_is_closed_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = HeadWatch(f"127.0.0.1:{server.getsockname()[1]}", emit=lambda event: None)
        assert watch.answers()
    assert not watch.answers()
