"""`sharded_suite.py` on several devices of the processor, in a process of its own: JAX makes its devices once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.device_places import DeviceRoom
from podembed.embedding.optimizers import SGD
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.declared import DeclaredTables
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from tests.long_tests import VARIABLE, long_case

ROOT = Path(__file__).parents[2]
# What makes other programs than the rest: weights, sequences, slots, rules for all rows, pipelines. The compiler takes
# long, so the others are long tests.
SHORT = ("all_places", "lie_over_all", "oracle", "drained_in_the_middle", "quantized", "uneven", "one_rate")


@pytest.mark.parametrize("num_devices", [4, *map(long_case, (1, 3, 8))])
def test_the_suite(num_devices: int) -> None:
    chosen = () if VARIABLE in os.environ else ("-k", " or ".join(SHORT))
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    plain = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *chosen, "tests/conformance/sharded_suite.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "XLA_FLAGS": " ".join([f"--xla_force_host_platform_device_count={num_devices}", *flags]),
            "PODEMBED_TEST_DEVICES": str(num_devices),
        },
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_other_tables_than_a_step_can_update_are_refused_where_they_are_declared() -> None:
    def declare(optimizer: SGD, place: str) -> None:
        table = TableConfig(10, 8, name="t", place=place)  # pyright: ignore[reportArgumentType]
        with LocalStrategy().scope():
            TPUEmbedding(FeatureConfig(table), 4, optimizer)

    with pytest.raises(ValueError, match="'t' with place='replicated'. Expected 'host' or 'sharded'"):
        declare(SGD(0.1), "replicated")
    with pytest.raises(ValueError, match="'t' with place='sharded' and use_gradient_accumulation=False"):
        declare(SGD(0.1, use_gradient_accumulation=False), "sharded")


def test_outside_any_scope_tables_lie_on_the_host() -> None:
    table = TableConfig(10, 8, name="t", place="sharded")
    embedding = TPUEmbedding(FeatureConfig(table))
    assert np.asarray(embedding.embedding_tables[table].value).shape == (10, 8)


def test_a_table_without_a_place_lies_on_the_host_where_devices_are_cpus() -> None:
    tables = [TableConfig(1 << 10, 8, name=name, place="auto") for name in "ab"]
    with LocalStrategy().scope():
        embedding = TPUEmbedding([FeatureConfig(table) for table in tables], 4, SGD(0.1))
    assert [(table.place, table.place_reason) for table in tables] == [
        ("host", "place='auto', and devices are CPUs")
    ] * 2
    embedding.enqueue([np.arange(4), np.arange(4)])
    assert [one.shape for one in embedding.dequeue()] == [(4, 8), (4, 8)]
    # With the memory of a larger chip, as `BuiltEmbedding` asks for it.
    more = [TableConfig(rows, 8, name=f"{rows}", place="auto") for rows in (1 << 10, 1 << 20)]
    declared = DeclaredTables.of([FeatureConfig(table) for table in more], SGD(0.1), needs_optimizer=True)
    declared.place(lambda: DeviceRoom(kind="chip", memory_bytes=1 << 20, num_parts=4))
    assert [table.place for table in more] == ["sharded", "host"]
