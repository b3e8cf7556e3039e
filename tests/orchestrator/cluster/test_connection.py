"""What the connection to Ray refuses, mostly before anything of Ray is started. What it starts is seen in
`tests/faults/test_own_cluster.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podembed.orchestrator.cluster import connection
from tests.long_tests import is_long
from tests.processes import wait_for

# Connects with the limits (soft, hard) of its first two arguments, after the statement of the third one.
PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
exec(sys.argv[3])
from podembed.orchestrator.cluster import connection
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.cluster.own_cluster import OwnCluster

def started(self, *arguments, **settings):
    print("begins with", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.exit()

OwnCluster.__init__ = started
try:
    with connection.connected(2):
        pass
except ConfigurationError as error:
    print(error)
"""


def words_of(*, limits: tuple[int, int], statement: str, temporary: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", PROGRAM, *(str(limit) for limit in limits), statement]
    done = subprocess.run(
        command, env=environment | {"TMPDIR": str(temporary)}, capture_output=True, text=True, check=False
    )
    assert list(temporary.iterdir()) == []
    return done.stdout + done.stderr


def test_too_low_a_limit_of_open_files_is_refused_before_ray_is_started(tmp_path: Path) -> None:
    words = words_of(limits=(64, 64), statement="", temporary=tmp_path)
    assert "limit 64" in words
    assert "Ray's daemon on this machine and the processes of 2 hosts" in words
    assert "ulimit -n" in words


def test_a_soft_limit_is_raised_before_ray_is_started_and_inherits_it(tmp_path: Path) -> None:
    assert words_of(limits=(64, 1024), statement="", temporary=tmp_path) == "begins with 1024\n"


@pytest.mark.parametrize(
    ("version", "mode", "words"),
    [
        ("2.99.0", "", "Found Ray 2.99.0.*token authentication.*Set RAY_AUTH_MODE=token"),
        ("2.99.0", "disabled", "begins with"),
        ("2.50.0", "", "begins with"),
    ],
)
def test_a_later_ray_whose_tokens_are_unknown_is_refused_in_words(
    version: str, mode: str, words: str, tmp_path: Path
) -> None:
    """Nothing is started without a token, but where somebody chose so, or a version that has none."""
    setup = "ray._private.authentication.authentication_token_setup"
    statement = f"import os, ray, {setup}; ray.__version__ = '{version}'; del {setup}.enable_token_auth_by_default"
    statement += f"; mode = '{mode}'; mode and os.environ.update(RAY_AUTH_MODE=mode)"
    assert re.search(words, words_of(limits=(1024, 1024), statement=statement, temporary=tmp_path))


LEAVING = """
import socket, sys, threading
import ray
from podembed.orchestrator.cluster import connection

has_begun = threading.Event()
def shutdown(**settings):
    has_begun.set()
    threading.Event().wait()
ray.shutdown = shutdown
connection.LEAVE_S = 0.1
with socket.create_server(("127.0.0.1", 0)) as head:
    connection.cluster_address = lambda: f"127.0.0.1:{head.getsockname()[1]}"
    foreign = connection._ForeignConnection(lambda event: print(event.sentence()))
    print(foreign.answers(), foreign.lost())
foreign.close()
print(has_begun.is_set(), connection.is_left_behind())
"""


def test_a_cluster_that_lost_its_head_is_left_behind_after_a_moment(tmp_path: Path) -> None:
    """Ray's own way out would never return here."""
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "True None"
    assert "takes no connection" in lines[1]
    assert lines[2].startswith("leaving Ray without its head")
    assert lines[3] == "True True"


def test_it_is_left_behind_at_once_where_python_starts_no_thread_any_more(tmp_path: Path) -> None:
    """As Python 3.12 at the end of a program."""
    refusing = """
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
threading.Thread.start = refuse
foreign.close()
"""
    program = LEAVING.replace("foreign.close()\n", refusing)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[3] == "False True"


class _Cluster(connection.Connection):
    """In place of one that the program starts. Mutated: how often it was started again."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    @property
    def is_own(self) -> bool:
        return True

    def lost(self) -> str | None:
        return None

    def renew(self, on_wait: Callable[[], None] | None = None) -> None:
        self._said.append("started again")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When the cluster of `shared_connection` was started and left."""
    words: list[str] = []

    @contextlib.contextmanager
    def connected(*arguments: Any, **named: Any) -> Iterator[connection.Connection]:
        words.append("started")
        yield _Cluster(words)
        words.append("left")

    monkeypatch.setattr(connection, "connected", connected)
    return words


def test_threads_share_one_cluster_and_the_last_one_leaves_it(said: list[str]) -> None:
    """The first to end is the one that started it."""
    can_leave = threading.Event()
    others: list[connection.Connection] = []

    def other() -> None:
        with connection.shared_connection(1) as found:
            others.append(found)
            can_leave.wait(60)

    thread = threading.Thread(target=other)
    with connection.shared_connection(1) as first:
        thread.start()
        wait_for("the other thread", lambda: bool(others), seconds=60)
        assert first.is_own
        assert others[0].is_own
    assert said == ["started"]
    can_leave.set()
    thread.join()
    assert said == ["started", "left"]
    with connection.shared_connection(1), pytest.raises(KeyError), connection.shared_connection(1):
        raise KeyError
    assert said == ["started", "left"] * 2


def test_a_cluster_that_one_thread_started_again_is_lost_for_the_other(said: list[str]) -> None:
    """All that it had there is gone. It need not start the cluster once more."""
    with connection.shared_connection(1) as first, connection.shared_connection(1) as second:
        first.renew()
        assert first.lost() is None
        assert "started the cluster again" in str(second.lost())
        assert not second.answers()
        second.renew()
        assert second.lost() is None
    assert said == ["started", "started again", "left"]


def test_each_user_of_a_cluster_of_others_hears_itself_of_a_silent_head(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Cluster, "is_own", False)
    monkeypatch.setattr(connection, "cluster_address", lambda: "127.0.0.1:1")
    heard: dict[str, list[object]] = {"first": [], "second": []}
    first = connection.shared_connection(1, emit=heard["first"].append)
    second = connection.shared_connection(1, emit=heard["second"].append)
    with first as one, second as other:
        # The first one has the connection itself, which tells nobody twice.
        assert one.answers()
        assert not other.answers()
    assert not heard["first"]
    assert len(heard["second"]) == 1
    assert said == ["started", "left"]


def test_who_waits_for_another_thread_can_be_stopped(said: list[str]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    waiting = connection.shared_connection(1, on_wait=stop)
    with connection._shared.turn(stop), pytest.raises(KeyboardInterrupt), waiting:
        pass
    assert said == []


def test_lines_of_the_collectives_are_not_shown_where_the_program_imported_ray_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private.ray_logging import LogDeduplicator

    loggers = [LogDeduplicator(5, None, None) for _ in range(2)]
    chosen = LogDeduplicator(5, None, "chosen by the program")
    for pair in (loggers, [chosen, chosen]):
        monkeypatch.setattr("ray._private.ray_logging.stdout_deduplicator", pair[0])
        monkeypatch.setattr("ray._private.ray_logging.stderr_deduplicator", pair[1])
        connection._skip_unwanted_lines()
    lines = ["[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1", "hello"]
    for logger in loggers:
        (shown,) = logger.deduplicate({"ip": "a", "pid": 1, "lines": lines})
        assert shown["lines"] == ["hello"]
    assert chosen.skip_re == re.compile("chosen by the program")


@is_long
@pytest.mark.ray
def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    joining = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    for environment in (
        joining | {"RAY_AUTH_TOKEN": "ab" * 32},
        {name: value for name, value in joining.items() if not name.startswith("RAY_AUTH_")},
    ):
        command = [sys.executable, "-m", "podembed", "train", "--job", "synthetic", "--max-steps", "1"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "refused this program" in done.stderr
        assert "Set RAY_AUTH_MODE=token" in done.stderr
