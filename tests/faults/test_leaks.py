"""What a run on a cluster of its own leaves behind when it ends badly or early: a folder with its commits, and nothing
else.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from podembed.orchestrator.commit.holder import read_heartbeat
from podembed.orchestrator.commit.lease_files import read_claims, read_commit_names
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.processes import said_by

MARK = "PODEMBED_TEST_MARK"


@dataclass(frozen=True)
class Ended:
    """One ended program. `temporary` was its folder for temporary files."""

    held: dict[str, Any]
    mark: str
    temporary: Path
    store: Store
    shared_memory: set[str]


def marked_processes(mark: str) -> list[str]:
    """Command lines of all processes that inherited the mark: the program's children, theirs, and orphans of either."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def wait_until_gone(mark: str) -> list[str]:
    deadline = time.monotonic() + 600
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="module", params=["fail", pytest.param("stop", marks=is_long)])
def ended(request: pytest.FixtureRequest, small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    mark = uuid.uuid4().hex
    # Short, since Ray puts sockets below it.
    temporary = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))
    storage = tmp_path_factory.mktemp("runs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {MARK: mark, "TMPDIR": str(temporary)}
    shared_before = set(os.listdir("/dev/shm"))
    arguments = (request.param, small_data, str(storage))
    held = said_by("tests.faults.ending_process", *arguments, timeout_s=900, environment=environment)
    shared = {name for name in set(os.listdir("/dev/shm")) - shared_before if "podembed" in name}
    yield Ended(held | {"mode": request.param}, mark, temporary, Store(str(storage / "run")), shared)
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.slow
def test_the_ending_is_the_one_that_was_asked_for(ended: Ended) -> None:
    if ended.held["mode"] == "stop":
        assert ended.held["ending"] == "stopped by SIGTERM"
        assert len(read_commit_names(ended.store)) == 1
    else:
        assert "ValueError: the user's callback is wrong" in ended.held["ending"]
        assert "broken_jobs.py" in ended.held["ending"]
        assert read_claims(ended.store) == [1], "an error of the job was tried again"


@pytest.mark.ray
@pytest.mark.slow
def test_no_process_no_connection_no_folder_and_no_lease_stay(ended: Ended) -> None:
    assert ended.held["children"] == []
    assert ended.held["connections"] == []
    assert wait_until_gone(ended.mark) == []
    assert [path.name for path in ended.temporary.iterdir() if path.name.startswith("podembed")] == []
    assert ended.shared_memory == set()
    assert read_heartbeat(ended.store, read_claims(ended.store)[-1]) is None
