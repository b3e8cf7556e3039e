"""What hosts say of themselves while they wait and work: for whom they wait, and how many rows are asked of each
owner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.orchestrator.decisions.stragglers import imbalance, is_notable
from podembed.workers.device.shared_memory import Record
from podembed.workers.liveness.progress import Progress
from podembed.workers.liveness.worker import Worker
from tests.small_job import B_ROWS, small_job, write_small_data
from tests.workers.host.test_host import BUCKETS, done, pod
from tests.workers.mesh.mesh_testing import PATIENCE_S


def wait_for(look: Callable[[], Progress], is_so: Callable[[Progress], bool]) -> Progress:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so(found := look()):
        assert time.monotonic() < deadline, f"it stays at {found}"
        time.sleep(0.01)
    return found


def test_a_host_names_the_host_that_it_waits_for_and_for_how_long(small_data: str, tmp_path: Path) -> None:
    with pod(small_job(folder=small_data, audit=False), tmp_path, 2) as hosts:
        hosts.all("restore", [(None,)] * 2)
        first, second = hosts.workers
        early = threading.Thread(target=first.train, args=(0, 1))
        early.start()
        waiting = wait_for(first.status, lambda seen: seen.phase == "id exchange" and seen.phase_s > 0.1)
        assert waiting.waits_for == (Worker("host", 1),)
        assert second.status().waits_for == ()
        second.train(0, 1)
        early.join(PATIENCE_S)
        assert first.status().waits_for == ()


def test_a_host_names_its_device_process(small_data: str, tmp_path: Path) -> None:
    is_seen = threading.Event()

    def answer(record: Record) -> Record:
        assert is_seen.wait(PATIENCE_S)
        return done(record)

    with pod(small_job(folder=small_data, audit=False), tmp_path, 1, answer=answer) as hosts:
        hosts.all("restore", [(None,)])
        training = threading.Thread(target=hosts.train, args=(0, 1))
        training.start()
        found = wait_for(hosts.workers[0].status, lambda seen: seen.phase == "device")
        assert found.waits_for == (Worker("device", 0),)
        is_seen.set()
        training.join(PATIENCE_S)


def test_ids_that_all_fall_into_one_bucket_are_seen_in_what_is_asked_of_its_owner(tmp_path: Path) -> None:
    write_small_data(tmp_path / "even")
    # Multiples of the number of buckets of table b: distinct rows, one bucket.
    for path in sorted((tmp_path / "even").glob("*.parquet")):
        table = pq.read_table(path)
        spread = np.arange(table.num_rows) * BUCKETS[1] % B_ROWS
        (tmp_path / "skewed").mkdir(exist_ok=True)
        at = table.column_names.index("b")
        pq.write_table(table.set_column(at, "b", pa.array(spread)), tmp_path / "skewed" / path.name, row_group_size=90)
    found = {}
    for name in ("even", "skewed"):
        job = small_job(folder=str(tmp_path / name), audit=False)
        with pod(job, tmp_path / f"{name}-run", 2, buckets=(1, 8, 1)) as hosts:
            hosts.all("restore", [(None,)] * 2)
            found[name] = imbalance([window.rows_asked for window in hosts.train(0, 30)])
        if name == "skewed":
            assert [table.name for table in job.tables][found[name].table] == "b"
    # As if the few steps of the test had taken no longer than that.
    assert not is_notable(found["even"], 2, window_s=0.01), found
    assert is_notable(found["skewed"], 2, window_s=0.01), found
