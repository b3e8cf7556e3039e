"""Several processes that score over the same memory: real processes, real kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.serving.publish.listing import roll_back
from podembed.serving.publish.publisher import publish
from podembed.serving.server.server_config import ServerConfig
from podembed.serving.server.worker_memory import WorkerMemory, opened
from podembed.serving.server.workers import _reserved
from tests.long_tests import is_long
from tests.serving.server.served_runs import listed, newest_commit, part, predicted, store_of
from tests.small_job import small_job
from tests.training import fit_job

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def until(found: Callable[[], bool], *, seconds: float = 60) -> None:
    end_s = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def children(pid: int) -> set[int]:
    """Processes of a parent that are no zombies."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(path.parent.name))
    return found


def test_workers_answer_alike_come_back_and_end(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False, dynamic=True)
    path = sorted(Path(small_data).glob("*.parquet"))[0]
    columns = part(listed(pq.read_table(path)), 0, 100)
    scores: dict[str, bytes] = {}

    def train(steps: int) -> tuple[str, str]:
        checkpoints = CheckpointConfig(every_steps=3, full_every=3)
        run = fit_job(job, tmp_path, name="run", max_steps=steps, checkpoint_config=checkpoints).path
        name = publish(run, job=job, keep=3).version.name
        commit = newest_commit(run)
        scores[name] = predicted(run, job, path, tmp_path / f"{commit}.parquet", commit=commit)[:100].tobytes()
        return run, name

    run, first = train(4)
    command = [sys.executable, "-m", "podembed", "serve", run, "--workers", "2", "--port", "0", "--poll-seconds", "0.2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline(), server.stdout.readline()]
            assert "same bits as published" in lines[0]
            address = lines[1].split()[2]
            body = json.dumps({name: columns[name] for name in columns if name not in ("label", "sample_id")}).encode()

            def ask() -> str:
                """The version that answers a connection, after a look at its scores."""
                try:
                    with urllib.request.urlopen(f"{address}/score", body, timeout=30) as answer:
                        found = json.load(answer)
                except ConnectionError:
                    return ""  # Of a worker that was killed.
                assert np.array(found["score"], np.float32).tobytes() == scores[found["model_version"]]
                return found["model_version"]

            def all_answer(name: str) -> bool:
                return {ask() for _ in range(8)} == {name}

            assert all_answer(first)
            _, second = train(7)
            until(lambda: all_answer(second))
            roll_back(store_of(run), first)
            until(lambda: all_answer(first))
            _, third = train(10)
            until(lambda: all_answer(third))
            workers = children(server.pid)
            assert len(workers) == 2
            os.kill(min(workers), signal.SIGKILL)
            until(lambda: len(children(server.pid) - {min(workers)}) == 2)
            until(lambda: all_answer(third))
            with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
                series = answer.read().decode()
            # Those of a worker that was killed count, too.
            asked = [line for line in series.splitlines() if line.startswith("podembed_serve_requests_total")]
            assert float(asked[0].split()[1]) >= 4 * 8
            assert "podembed_serve_follows 1.0" in series
            workers = children(server.pid)
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        finally:
            server.kill()


@is_long
def test_workers_end_with_the_process_that_tells_them(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False)
    run = fit_job(job, tmp_path, name="run", max_steps=2).path
    publish(run, job=job)
    command = [sys.executable, "-m", "podembed", "serve", run, "--workers", "2", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            _, line = server.stdout.readline(), server.stdout.readline()
            port = line.split()[2].rpartition(":")[2]
            # Another server does not join them by mistake.
            again = [*command[:-1], port]
            other = subprocess.run(again, capture_output=True, text=True, env=environment, timeout=60, check=False)
            assert (other.returncode, "a free port" in other.stderr) == (87, True), other.stderr
            workers = children(server.pid)
            assert [*tmp_path.glob("podembed-serve-*")]
        finally:
            server.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert not [*tmp_path.glob("podembed-serve-*")]


def test_a_port_of_others_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = ServerConfig(port=other.getsockname()[1])
        with pytest.raises(ConfigurationError, match="a free port"), _reserved(config):
            pass
    with _reserved(config) as port, pytest.raises(ConfigurationError), _reserved(ServerConfig(port=port)):
        pass


def test_memory_is_mapped_while_it_is_there() -> None:
    memory = WorkerMemory()
    rows = memory.rows(5, 3)
    rows[:] = np.arange(15).reshape(5, 3)
    place = memory.place_of(rows)
    mapped = opened(json.loads(json.dumps(place)))
    assert mapped.tobytes() == rows.tobytes()
    rows[2] = 7
    assert mapped[2].tolist() == [7, 7, 7]
    del rows
    # What is mapped stays, but nobody else can open it, also if the number stands for something else.
    assert mapped[2].tolist() == [7, 7, 7]
    with pytest.raises(ConfigurationError, match="Run without --workers"):
        opened(place)
    other = memory.copy(np.arange(4, dtype=np.int32))
    with pytest.raises(ConfigurationError, match="Run without --workers"):
        opened({**place, "descriptor": memory.place_of(other)["descriptor"]})
    assert memory.rows(0, 3).shape == opened(memory.place_of(memory.rows(0, 3))).shape == (0, 3)


def test_workers_are_for_whole_tables() -> None:
    with pytest.raises(ConfigurationError, match="workers beside shards"):
        ServerConfig(workers=2, shards=("http://a",))
    with pytest.raises(ConfigurationError, match="Found 0 workers"):
        ServerConfig(workers=0)
