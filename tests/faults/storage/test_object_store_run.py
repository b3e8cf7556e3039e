"""A whole life of a run on S3, with real processes: train on two hosts, lose the driver, resume with another number of
hosts, and every tool; in long tests a host is lost before. The processes find the service through their environment
alone, as on a cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from podembed.orchestrator.commit.lease_files import read_head, read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.workers.storage.store import Store
from tests.jobs.cli.test_main import run
from tests.long_tests import long_case
from tests.orchestrator.driver.test_equality import expected_audit
from tests.run_state import committed_state
from tests.small_job import small_job
from tests.tools.tracing.reading import read_trace

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 900


@contextlib.contextmanager
def training(folder: str, storage: str) -> Iterator[psutil.Process]:
    """`podembed train` on two hosts of a cluster of its own; far more steps than anybody waits for."""
    command = [sys.executable, "-m", "podembed", "train", "--job", "tests.small_job:small_job"]
    command += ["--set", f"folder={folder}", "epochs=5000", "--storage", storage, "--name", "run"]
    command += ["--hosts", "2", "--threads-per-host", "1", "--checkpoint-every", "5"]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process = psutil.Process(program.pid)
    family: list[psutil.Process] = []
    try:
        yield process
        family = process.children(recursive=True)
        process.kill()
        assert program.stderr is not None
        program.wait(timeout=120)
    finally:
        for member in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def wait_for(what: str, found: Callable[[], bool], process: psutil.Process) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not found():
        assert process.is_running(), f"the driver is gone while waiting for {what}"
        assert process.status() != psutil.STATUS_ZOMBIE, f"the driver is gone while waiting for {what}"
        assert time.monotonic() < deadline, f"no {what} within {TIMEOUT_S} s"
        # A look takes a twentieth of a second of a processor, here and of the service.
        time.sleep(1.0)


def head(store: Store) -> tuple[int, int]:
    """(step, generation) of the newest commit."""
    return parse_commit_name(read_head(store) or "") or (0, 0)


# make test loses hosts with commits on a disk: to the driver a store is as good as another.
@pytest.mark.parametrize("loses_host", [False, long_case(True)])
@pytest.mark.ray
@pytest.mark.slow
def test_train_kill_resume_and_look(loses_host: bool, s3_url: str, small_data: str, tmp_path: Path) -> None:
    store, url = Store(f"{s3_url}/run"), f"{s3_url}/run"
    with training(small_data, s3_url) as driver:
        wait_for("second commit", lambda: head(store)[0] >= 10, driver)
        if loses_host:
            family = driver.children(recursive=True)
            host = next(member for member in family if "".join(member.cmdline()).startswith("ray::_HostActor"))
            os.kill(host.pid, signal.SIGKILL)
            wait_for("commit of the next generation", lambda: head(store)[1] >= 2, driver)
    step = head(store)[0]

    traced = f"{step + 2}:{step + 5}"
    code, out, err = run("resume", url, "--in-process", "--max-steps", str(step + 7), "--keep", "4", "--trace", traced)
    assert code == 0, err
    (trace,) = store.list("traces")
    assert f"traced steps {step + 2} to {step + 4}: {url}/{trace} " in out
    assert [*read_trace(store.read(trace, max_bytes=1 << 20))] == ["driver", "host 0", "device 0"]
    assert f"from commit {read_lineage(store)[1]}" in out
    assert head(store)[0] == step + 7
    state = committed_state(url)
    job = small_job(folder=small_data, epochs=5000)
    np.testing.assert_allclose(state["audit/rows"][:, 0], expected_audit(job, step + 7), atol=1e-3)

    code, out, _ = run("inspect", url)
    assert (code, "b " in out, "zarr.open" in out) == (0, True, True)
    code, out, _ = run("fsck", url)
    assert code == 0, out
    exported = tmp_path / "b.npy"
    assert run("export", url, "--table", "b", "--out", str(exported))[0] == 0
    np.testing.assert_array_equal(np.load(exported), state["b/rows"])
    assert run("prune", url, "--keep", "2")[0] == 0
    assert len(store.children("commit")) == 2
    assert run("fsck", url)[0] == 0
    assert run("diff", url, f"{url}@{read_lineage(store)[1]}")[0] == 1

    victim = next(name for name in store.list("data") if name.endswith("/0/0"))
    data = bytearray(store.read(victim, max_bytes=1 << 30))
    data[7] ^= 1
    store.replace(victim, bytes(data))
    code, out, _ = run("fsck", url)
    assert (code, victim in out) == (1, True)
