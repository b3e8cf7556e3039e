"""Sums over processes: one process here, two real ones under `jax.distributed`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.tf.keras.reducer import AllProcesses, OneProcess, default_gradient_reducer
from podembed.embedding.tf.keras.row_slices import RowSlices
from tests.processes import free_port

REPOSITORY = Path(__file__).parents[4]
DEADLINE_S = 600.0


def test_one_process_has_nothing_to_add():
    gradient = jnp.ones(2)
    assert isinstance(default_gradient_reducer(), OneProcess)
    assert default_gradient_reducer().sum([gradient])[0] is gradient


def test_the_collective_way_over_a_single_process_changes_nothing():
    slices = RowSlices([2, 0], [[1.0], [2.0]], (3, 1))
    first, rows, last = AllProcesses().sum([jnp.arange(3.0), slices, jnp.float32(5.0)])
    np.testing.assert_array_equal(first, [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(rows.dense(), slices.dense())
    assert last == 5.0
    assert AllProcesses().sum([]) == []


@pytest.fixture(scope="module")
def held_by_two():
    """What each of two processes holds after training together; tries once more if another program took the port
    meanwhile.
    """
    for attempt in (1, 2):
        held = run_processes(2)
        if held is not None:
            return held
        assert attempt == 1, "the two processes did not finish"
    return None


def run_processes(count):
    """The JSON of each process, or None if one failed or the deadline passed. No process outlives the call."""
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.embedding.tf.keras.keras_process", address, str(count)]
    processes = [
        subprocess.Popen([*command, str(index)], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
        for index in range(count)
    ]
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        outputs = [one.communicate(timeout=max(0.1, deadline_s - time.monotonic()))[0] for one in processes]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for one in processes:
            one.kill()
            one.wait(timeout=10)
    if any(one.returncode != 0 for one in processes):
        return None
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_two_processes_sum_dense_gradients(held_by_two):
    assert [held["processes"] for held in held_by_two] == [2, 2]
    assert [held["w"] for held in held_by_two] == [[-3.0, -6.0]] * 2
    assert held_by_two[0]["adam"] == held_by_two[1]["adam"] == pytest.approx(0.9, abs=1e-5)


def test_two_processes_gather_rows_in_their_order(held_by_two):
    assert [held["gathered_rows"] for held in held_by_two] == [[1, 1, 3]] * 2
    assert [held["table"] for held in held_by_two] == [[[0, 0], [-11, -11], [0, 0], [-10, -10]]] * 2


def test_two_processes_keep_missing_gradients_and_count_a_step_once(held_by_two):
    assert [(held["none_stays"], held["idle"], held["iterations"]) for held in held_by_two] == [(True, 7.0, 2)] * 2


def test_two_processes_do_not_sum_again_what_spans_them(held_by_two):
    assert all("skip_gradients_aggregation=True" in held["refusal"] for held in held_by_two)


def test_two_processes_apart_when_the_sum_is_skipped(held_by_two):
    assert [held["skipped"] for held in held_by_two] == [[-3.0, -6.0], [-4.0, -7.0]]
