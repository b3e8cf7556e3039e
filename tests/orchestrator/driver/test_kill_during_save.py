"""SIGKILL inside every storage operation of a save, of rows that rest and of rows that train: the acknowledged commits
stand, and the next driver goes on.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.keep import keep_latest
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.workers.checkpoint.files import read_bucket
from podembed.workers.storage.store import Store
from tests.long_tests import is_long, long_case
from tests.orchestrator.commit.checkpoint_samples import take, write_next
from tests.orchestrator.driver.saving_process import COUNTS, live, live_and_train

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.orchestrator.driver.saving_process"])
STEPS = (30, 40, 50)


def run_life(
    url: Path, die_at: int, moment: str, life: Callable[..., None] = live
) -> tuple[list[str], int | None, int | None]:
    """Returns (acknowledged commits, operations if it finished, exit code)."""
    heard, said = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=life, args=(str(url), STEPS, die_at, moment, said))
    process.start()
    said.close()
    messages: list[str | int] = []
    try:
        while heard.poll(60):
            messages.append(heard.recv())
    except EOFError:
        pass
    process.join(timeout=300)
    acknowledged = [message for message in messages if isinstance(message, str)]
    counted = next((message for message in messages if isinstance(message, int)), None)
    return acknowledged, counted, process.exitcode


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process loses nothing that the kernel has, so no disk is
    needed.
    """
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory)) if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("scratch")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def beginning(scratch: Path) -> Path:
    """A run with two commits, from which every life starts."""
    url = scratch / "beginning"
    store = Store(url)
    lease = take(store)
    for step in (10, 20):
        checkpoint.commit(store, write_next(store, lease, step), lease)
    return url


@pytest.fixture(scope="module")
def num_operations(beginning: Path, scratch: Path) -> int:
    url = scratch / "whole"
    shutil.copytree(beginning, url)
    acknowledged, counted, code = run_life(url, 10**9, "never")
    assert (len(acknowledged), code) == (len(STEPS), 0)
    assert counted is not None
    return counted


MOMENTS = ("before", "inside", "after")


@pytest.mark.parametrize("moment", ["inside", *map(long_case, ["before", "after"])])
def test_a_kill_anywhere_leaves_every_acknowledged_commit(
    beginning: Path, num_operations: int, scratch: Path, moment: str
) -> None:
    """Every sixth operation, each moment at other ones."""
    kill_at(range(1 + 2 * MOMENTS.index(moment), num_operations + 1, 6), beginning, scratch, moment)


@is_long
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_each_operation(beginning: Path, num_operations: int, scratch: Path, moment: str) -> None:
    kill_at(range(1, num_operations + 1), beginning, scratch, moment)


@pytest.mark.parametrize("moment", ["after", *map(long_case, ["before", "inside"])])
def test_a_kill_of_a_save_beside_training_leaves_every_acknowledged_commit(
    beginning: Path, scratch: Path, moment: str
) -> None:
    """The first save, and the second to its end; every fourth operation, each moment at other ones."""
    url = scratch / f"whole-{moment}"
    shutil.copytree(beginning, url)
    acknowledged, counted, code = run_life(url, 10**9, "never", live_and_train)
    assert (len(acknowledged), code) == (len(STEPS), 0)
    assert counted is not None
    check_cuts(Store(url), at_least=len(STEPS))
    kill_at(range(1 + MOMENTS.index(moment), counted * 2 // 3, 4), beginning, scratch, moment, live_and_train)


def kill_at(points: range, beginning: Path, scratch: Path, moment: str, life: Callable[..., None] = live) -> None:
    for point in points:
        url = scratch / f"{moment}-{point}"
        shutil.copytree(beginning, url)
        acknowledged, _, code = run_life(url, point, moment, life)
        check_cuts(Store(url), at_least=len(acknowledged) if life is live_and_train else 0)
        assert code == -signal.SIGKILL or (moment == "inside" and code == 0)
        check_what_is_left(Store(url), acknowledged)
        shutil.rmtree(url)


def check_cuts(store: Store, *, at_least: int) -> None:
    """All rows of the table that trained meanwhile have done the same number of steps."""
    tables: list[Any] = [
        table for name in read_lineage(store) for table in checkpoint.load(store, name).tables if table.name == COUNTS
    ]
    assert len(tables) >= at_least
    for table in tables:
        values = np.stack([read_bucket(store, table, bucket)[0] for bucket in range(table.num_buckets)])
        assert np.unique(values).size == 1


def check_what_is_left(store: Store, acknowledged: list[str]) -> None:
    lineage = read_lineage(store)
    expected = ["s000000010-g00000001", "s000000020-g00000001", *acknowledged]
    known = [name for name in lineage if name in expected]
    assert known == expected[::-1][: len(known)]
    assert len(lineage) >= 2
    # At most one more stands, the newest: published, but killed before anybody was told.
    assert lineage[: len(lineage) - len(known)] == tuple(set(lineage) - set(expected))
    assert len(lineage) - len(known) <= 1
    head = checkpoint.load_head(store)
    assert head is not None
    assert (head.step, head.generation) == parse_commit_name(lineage[0])
    for name in lineage[:2]:
        assert checkpoint.verify(store, checkpoint.load(store, name)).is_intact
    successor = take(store, "successor")
    assert successor.head == lineage[0]
    manifest = write_next(store, successor, 100)
    checkpoint.commit(store, manifest, successor)
    keep_latest(store, successor, num_to_keep=2)
    # What the killed driver left half done is gone; temporary names never show.
    assert store.children("data") == sorted([lineage[0], manifest.name])
    assert checkpoint.verify(store, manifest).is_intact
