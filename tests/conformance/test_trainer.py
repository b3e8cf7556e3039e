"""A `Trainer` trains what `TPUEmbedding` trains, with the same numbers: every way of looking up and updating."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.result import Result
from podembed.workers.input.index import build_index
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import cut_ways, table_specs
from tests.conformance.odd_job import (
    BATCH_SIZE,
    NUM_BATCHES,
    WAYS,
    batches_of,
    embedding_of,
    odd_job,
    state_of,
    steps_of_tpu_embedding,
    write_odd_data,
)
from tests.long_tests import is_long, long_case
from tests.run_state import assert_same_bytes, committed_state
from tests.training import fit_job
from tests.workers.host.test_host import pod

NUM_ROWS = 40
# Of the tables `odd` and `plain`: one bucket lies whole on one host, several are cut over all of them.
WHOLE, CUT = (1, 1), (8, 4)


def train(
    folder: Path, name: str, way: str, *, num_hosts: int = 1, max_steps: int = NUM_BATCHES, **options: Any
) -> Result:
    reference = JobReference(
        function="tests.conformance.odd_job:odd_job", arguments={"folder": str(folder), "way": way, **options}
    )
    return fit_job(
        reference,
        folder / "runs",
        name=name,
        num_hosts=num_hosts,
        max_steps=max_steps,
        checkpoint_config=CheckpointConfig(every_steps=100),
    )


def assert_same_numbers(folder: Path, name: str, result: Result, expected: tuple[list[float], dict]) -> None:
    losses, tables = expected
    np.testing.assert_allclose([result.losses[step] for step in sorted(result.losses)], losses, rtol=2e-5)
    found = committed_state(str(folder / "runs" / name))
    assert_same_tables({key: values for key, values in found.items() if not key.startswith("dense/")}, tables)


def assert_same_tables(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=2e-5, atol=2e-6, err_msg=key)


@pytest.mark.parametrize(("way", "staleness"), [*((way, 0) for way in WAYS), ("everything", 1)])
def test_one_host(way: str, staleness: int, tmp_path: Path) -> None:
    write_odd_data(tmp_path, way, odd_rows=NUM_ROWS)
    result = train(tmp_path, "run", way, odd_rows=NUM_ROWS, staleness=staleness)
    expected = steps_of_tpu_embedding(str(tmp_path), way, odd_rows=NUM_ROWS, staleness=staleness)
    assert_same_numbers(tmp_path, "run", result, expected)


HOSTS: list[tuple[int, tuple[int, ...], bool, dict[str, Any]]] = [
    (2, WHOLE, True, {}),
    (3, CUT, False, {}),
    (2, CUT, False, {"staleness": 1}),
    (3, CUT, True, {"overlap": False}),
]


@pytest.mark.parametrize(
    ("way", "num_hosts", "buckets", "shares_memory", "options"),
    [
        # How steps overlap hangs on no way of looking up: the one that has everything stands for all.
        (long_case if options and way != "everything" else pytest.param)(way, num_hosts, buckets, shares, options)
        for way in WAYS
        for num_hosts, buckets, shares, options in HOSTS
    ],
)
def test_several_hosts(
    way: str, num_hosts: int, buckets: tuple[int, ...], shares_memory: bool, options: dict, tmp_path: Path
) -> None:
    """Hosts in threads, whose device takes the activations, divided by the batch, for the gradients."""
    write_odd_data(tmp_path, way, odd_rows=NUM_ROWS)
    job = odd_job(folder=str(tmp_path), way=way, odd_rows=NUM_ROWS, **options)
    with pod(job, tmp_path / "run", num_hosts, buckets=buckets, shares_memory=shares_memory) as hosts:
        hosts.all("restore", [(None,)] * num_hosts)
        hosts.train(0, NUM_BATCHES)
        found = hosts.state("c-1")
    assert_same_tables(found, updated_by_activations(str(tmp_path), way, staleness=job.staleness))


@pytest.mark.parametrize("way", ["sequence", "single", "unaccumulated", "quantized", "output_shape"])
@pytest.mark.parametrize(("num_hosts", "buckets"), [(1, WHOLE), (2, WHOLE), (3, CUT)])
def test_keys_that_come(way: str, num_hosts: int, buckets: tuple[int, ...], tmp_path: Path) -> None:
    """Keys that get their rows when they first come, with room for all, train as row numbers do."""
    write_odd_data(tmp_path, way, odd_rows=NUM_ROWS)
    job = odd_job(folder=str(tmp_path), way=way, odd_rows=NUM_ROWS)
    for table in job.tables:
        table.vocabulary_size *= 4
        table.dynamic_keys = DynamicKeys(capacity=table.vocabulary_size)
    with pod(job, tmp_path / "run", num_hosts, buckets=buckets, shares_memory=num_hosts == 2) as hosts:
        hosts.all("restore", [(None,)] * num_hosts)
        hosts.train(0, NUM_BATCHES)
        found = hosts.state("c-1")
    expected = updated_by_activations(str(tmp_path), way, staleness=0)
    for name in ("odd", "plain"):
        is_used = found[f"{name}/last"][:, 0] > 0
        keys = found[f"{name}/key"][is_used, 0]
        assert len(keys) > 30
        for array in (key for key in expected if key.startswith(f"{name}/")):
            np.testing.assert_allclose(found[array][is_used], expected[array][keys], rtol=2e-5, atol=2e-6)


def test_unaccumulated_updates_come_in_the_order_of_the_features_which_a_list_gives_an_embedding_too(
    tmp_path: Path,
) -> None:
    """Two features share the table, and their updates do not commute; of a dict an embedding sorts the names."""
    write_odd_data(tmp_path, "unaccumulated", odd_rows=NUM_ROWS)
    job = odd_job(folder=str(tmp_path), way="unaccumulated", odd_rows=NUM_ROWS)
    order = ["other", "one", "odd"]
    job = replace(job, features={name: job.features[name] for name in order})
    with pod(job, tmp_path / "run", 2, buckets=WHOLE) as hosts:
        hosts.all("restore", [(None,)] * 2)
        hosts.train(0, NUM_BATCHES)
        found = hosts.state("c-1")
    with embedding_of([job.features[name] for name in order], staleness=0) as embedding:
        for batch in batches_of(str(tmp_path)):
            embedding.enqueue([batch[name] for name in order], training=True)
            embedding.apply_gradients([value / BATCH_SIZE for value in embedding.dequeue()])
        expected = state_of(embedding)
    assert_same_tables(found, expected)
    by_name = updated_by_activations(str(tmp_path), "unaccumulated", staleness=0)
    assert not np.allclose(found["odd/rows"], by_name["odd/rows"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("way", ["drop", "clip", "hash"])
@pytest.mark.parametrize(
    ("num_hosts", "shares_memory", "options"),
    [(2, True, {}), (2, False, {"staleness": 1}), (3, False, {}), (3, True, {"overlap": False})],
)
def test_cut_tables_that_their_owners_pool(
    way: str, num_hosts: int, shares_memory: bool, options: dict, tmp_path: Path
) -> None:
    """Bags so long, in a table so large, that partial sums are fewer than rows; `one` travels as rows beside them."""
    num_rows = 100 * NUM_ROWS
    write_odd_data(tmp_path, way, odd_rows=num_rows, longest=20)
    job = odd_job(folder=str(tmp_path), way=way, odd_rows=num_rows, **options)
    lengths = bag_lengths(job, build_index(job.resolved_data))
    ways = cut_ways(job, table_specs(job, CUT), lengths, num_hosts=num_hosts)
    assert [way.is_pooled for way in ways] == [True, False]
    with pod(job, tmp_path / "run", num_hosts, buckets=CUT, shares_memory=shares_memory) as hosts:
        hosts.all("restore", [(None,)] * num_hosts)
        hosts.train(0, NUM_BATCHES)
        found = hosts.state("c-1")
    expected = updated_by_activations(str(tmp_path), way, staleness=job.staleness, odd_rows=num_rows)
    assert_same_tables(found, expected)


def updated_by_activations(folder: str, way: str, *, staleness: int, odd_rows: int = NUM_ROWS) -> dict[str, np.ndarray]:
    """The same by `TPUEmbedding` in one process."""
    job = odd_job(folder=folder, way=way, odd_rows=odd_rows)
    with embedding_of(job.features, staleness=staleness) as embedding:
        for batch in batches_of(folder):
            embedding.enqueue({name: batch[name] for name in job.features}, training=True)
            vectors = embedding.dequeue()
            embedding.apply_gradients({name: value / BATCH_SIZE for name, value in vectors.items()})
        return state_of(embedding)


def test_two_parts_are_one_training(tmp_path: Path) -> None:
    """A run that stops and goes on, with an evaluation between, ends with the bytes of one that does not."""
    write_odd_data(tmp_path, "everything", odd_rows=NUM_ROWS)
    train(tmp_path, "whole", "everything", odd_rows=NUM_ROWS)
    train(tmp_path, "parts", "everything", odd_rows=NUM_ROWS, max_steps=2)
    resumed = train(tmp_path, "parts", "everything", odd_rows=NUM_ROWS)
    assert sorted(resumed.losses) == [2, 3, 4, 5]
    assert_same_bytes(*(committed_state(str(tmp_path / "runs" / name)) for name in ("whole", "parts")))


# In make test, hosts are threads above, and test_equality.py compares two hosts of a cluster with one.
@is_long
@pytest.mark.ray
def test_two_hosts_of_a_cluster(ray_cluster: None, tmp_path: Path) -> None:
    write_odd_data(tmp_path, "everything", odd_rows=NUM_ROWS)
    result = train(tmp_path, "run", "everything", num_hosts=2, odd_rows=NUM_ROWS)
    assert_same_numbers(tmp_path, "run", result, steps_of_tpu_embedding(str(tmp_path), "everything", odd_rows=NUM_ROWS))
