"""Device processes as a gang: several devices each, and gangs that are none."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from podembed.workers.device import waiting_threads
from podembed.workers.device.gang import join_gang
from podembed.workers.device.gang_errors import GangError
from podembed.workers.device.model_step import DeviceWorker
from tests.long_tests import is_long
from tests.processes import free_port
from tests.small_job import small_job
from tests.workers.device import gang_process
from tests.workers.device.gang_process import NUM_PROCESSES, NUM_STEPS, WEIGHT_SUM, share
from tests.workers.device.test_model_step import NUM_SAMPLES, Plain

ROOT = Path(__file__).parents[3]
PATIENCE_S = 900.0


@pytest.fixture
def gang(small_data: str, tmp_path: Path) -> list[dict[str, np.ndarray]]:
    """What the hosts of the two processes got."""
    coordinator = f"127.0.0.1:{free_port()}"
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    files = [tmp_path / f"{process}.npz" for process in range(NUM_PROCESSES)]
    members = [
        subprocess.Popen(
            [sys.executable, "-m", gang_process.__name__, str(process), coordinator, small_data, str(file)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, file in enumerate(files)
    ]
    try:
        errors = [member.communicate(timeout=PATIENCE_S)[1] for member in members]
    finally:
        for member in members:
            member.kill()
    for member, text in zip(members, errors, strict=True):
        assert member.returncode == 0, text
    return [dict(np.load(file)) for file in files]


# In make test, such gangs train the runs of test_runs.py in ../device_tables.
@is_long
def test_two_processes_of_two_devices_train_as_one(small_data: str, gang: list[dict[str, np.ndarray]]) -> None:
    """Also: no value that all have anyway crosses the network, and rows come back in their order whatever order JAX
    lists devices in. The one thread that waits for the other process pushes no other thread off a processor.
    """
    job = small_job(folder=small_data, audit=False)
    plain = Plain(job)
    for step in range(NUM_STEPS):
        parts = [share(job, step, process) for process in range(NUM_PROCESSES)]
        loss, gradients = plain.step(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts), WEIGHT_SUM)
        for process, found in enumerate(gang):
            assert found["losses"][step] == pytest.approx(loss, rel=1e-5)
            mine = slice(process * NUM_SAMPLES, (process + 1) * NUM_SAMPLES)
            for at, wanted in enumerate(gradients):
                np.testing.assert_allclose(found[f"{step}/{at}"], wanted[mine], rtol=1e-4, atol=1e-7)
    assert [int(found["batch_threads"]) for found in gang] == [1] * NUM_PROCESSES
    for process, found in enumerate(gang):
        batch = share(job, 0, process)
        scores = jax.jit(job.model.apply)(plain.params, batch["dense"], batch["activations"])
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-4, atol=1e-5)


def test_processes_whose_devices_are_not_joined_are_no_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: asked.update(arguments))
    with pytest.raises(
        GangError, match=r"Found 1 JAX processes that share devices, as process 1 with .* Expected 2, one a host"
    ):
        join_gang(coordinator="127.0.0.1:1", num_processes=2, process=1, timeout_s=1)
    assert asked["num_processes"] == 2


def test_hosts_with_different_numbers_of_devices_are_refused(small_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gang has as many devices as there are here, but is said to have two members."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        GangError, match=r"Found 1 devices here and 1 in all 2 JAX processes\. Expected as many in each"
    ):
        DeviceWorker(job=small_job(folder=small_data), num_samples=8).build()


def test_of_new_threads_those_that_wait_for_sockets_become_batch_threads() -> None:
    reader, writer = os.pipe()
    ends, goes_on = threading.Event(), threading.Event()

    def wait_for_sockets() -> None:
        with select.epoll() as poll:
            poll.register(reader, select.EPOLLIN)
            goes_on.set()
            poll.poll(PATIENCE_S)

    before = waiting_threads.threads()
    others = [threading.Thread(target=wait_for_sockets), threading.Thread(target=ends.wait)]
    for thread in others:
        thread.start()
    try:
        assert goes_on.wait(PATIENCE_S)
        changed = waiting_threads.calm_waiting(before, looks=10_000)
        assert changed == (others[0].native_id,)
        policies = [os.sched_getscheduler(thread.native_id or 0) for thread in others]
        assert policies == [os.SCHED_BATCH, os.SCHED_OTHER]
        assert waiting_threads.calm_waiting(waiting_threads.threads(), looks=1) == ()
    finally:
        os.write(writer, b"x")
        ends.set()
        for thread in others:
            thread.join(PATIENCE_S)
        os.close(reader)
        os.close(writer)


def test_where_threads_are_not_listed_none_is_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(waiting_threads, "_OWN_THREADS", tmp_path / "none")
    assert waiting_threads.calm_waiting(waiting_threads.threads()) == ()


@pytest.mark.parametrize(("use", "shown"), [("x = jnp.ones((3, 2))", "float32[3, 2]"), ("float(jnp.ones(()))", "none")])
def test_a_process_that_has_used_jax_says_what_keeps_it_from_joining(use: str, shown: str) -> None:
    program = (
        "import jax.numpy as jnp\n"
        "from podembed.workers.device.gang import join_gang\n"
        f"{use}\n"
        f"join_gang(coordinator='127.0.0.1:{free_port()}', num_processes=2, process=0, timeout_s=60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"GangError: Found that JAX was used while the job was read (arrays that are still there: {shown})." in (
        done.stderr
    )
