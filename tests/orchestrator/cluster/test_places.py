"""Machines whose daemons take connections are told from those that are gone, and from those that do not answer at
all.
"""

from __future__ import annotations

import socket
import time

from podembed.orchestrator.cluster.places import taking_connections
from tests.workers.mesh.mesh_testing import LOCAL
from tests.workers.mesh.test_link_silence import without_answer


def test_machines_that_refuse_and_those_that_do_not_answer_take_none() -> None:
    with socket.create_server((LOCAL, 0)) as listener, socket.socket() as closed, without_answer() as silent:
        closed.bind((LOCAL, 0))
        daemons = {"gone": closed.getsockname(), **{f"cut off {at}": silent for at in range(200)}}
        began = time.monotonic()
        assert taking_connections(daemons, timeout_s=0.3) == set()
        assert time.monotonic() - began < 30.0, "one after the other takes a minute"
        assert "there" in taking_connections({"there": listener.getsockname()}, timeout_s=60.0)


def test_many_machines_are_asked_in_parts() -> None:
    with socket.create_server((LOCAL, 0), backlog=600) as listener:
        daemons = {f"machine {at}": listener.getsockname() for at in range(450)}
        assert taking_connections(daemons, timeout_s=60.0) == {*daemons}


def test_of_no_machines_none_takes_any() -> None:
    assert taking_connections({}) == set()
