"""What `podembed plan` says of a step and of memory."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import SGD
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.embedding.vocabulary.policies import MinCount
from podembed.jobs.planning.data_at_hand import ProfilesAtHand
from podembed.jobs.planning.memory import PROCESS_BYTES, host_memory, render_keys, render_memory
from podembed.jobs.planning.step import render_step
from podembed.orchestrator.decisions.table_plan import plan
from tests.orchestrator.planning.test_traffic import DIM, PROFILE, counted, job_of, table


def test_memory_is_that_of_its_parts() -> None:
    job = job_of({"t": table(1 << 20, "t", optimizer=SGD(0.1))})
    found = plan(job, num_hosts=2)
    memory = host_memory(job, found, counted(job), undo_share=0.1)
    assert memory.table_bytes == max(host.shard_bytes for host in found.hosts) == 4 * DIM << 19
    assert memory.mark_bytes == 4 << 19
    assert memory.undo_bytes > 0.1 * memory.table_bytes
    assert memory.process_bytes == PROCESS_BYTES
    # With a lookup ahead, two batches are in flight.
    alone = host_memory(replace(job, overlap=False), found, counted(job), undo_share=0.1)
    assert memory.batch_bytes == 2 * alone.batch_bytes > 0
    parts = memory.table_bytes + memory.mark_bytes + memory.hash_slot_bytes + memory.undo_bytes + memory.save_bytes
    assert memory.total_bytes == parts + memory.batch_bytes + memory.process_bytes
    assert "the process without tables" in render_memory(memory)


def test_maps_of_keys_are_counted_and_the_chance_of_a_refusal_is_told() -> None:
    size = {"dim": DIM, "name": "t", "optimizer": SGD(0.1)}
    keys = TableConfig(capacity=1 << 18, **size)
    waiting = TableConfig(capacity=1 << 18, admit=MinCount(2), **size)
    memory = {}
    for config in (keys, waiting):
        job = job_of({"t": config})
        memory[config] = host_memory(job, plan(job, num_hosts=1), counted(job, num_hosts=1), undo_share=0.1)
        spec = TableSpec.of(config, seed=0)
        # What the index of the whole table takes, of which no page is touched.
        index = Table(spec, np.arange(spec.layout.num_buckets)).index
        held = {id(array): array.nbytes for array in arrays_of(index) if array.size >= spec.layout.num_buckets}
        assert memory[config].map_bytes == pytest.approx(sum(held.values()), rel=0.01)
    text = render_keys([TableSpec.of(keys, seed=0), TableSpec.of(waiting, seed=0)])
    assert "into 8 buckets of 33,674 rows, 5 standard deviations more than the mean of 32,768" in text
    assert "a table with 262,144 keys refuses one with a probability of 3.9e-07" in text
    assert f"{4 * DIM} of row and slots, 16 of columns, 23 of maps and marks" in text
    assert f"{4 * DIM} of row and slots, 32 of columns, 53 of maps and marks" in text
    assert "maps of keys" in render_memory(memory[keys])
    assert render_keys([TableSpec.of(TableConfig(9, **size), seed=0)]) == ""


def arrays_of(index: object) -> list[np.ndarray]:
    """All arrays that an index holds, those of its maps too."""
    values = [*vars(index).values()]
    values += [one for value in values if type(value).__name__ == "_Map" for one in vars(value).values()]
    return [value for value in values if isinstance(value, np.ndarray)]


@pytest.mark.parametrize(("capacity", "num_buckets"), [(3000, 4), (70, 2)])
def test_the_chance_of_a_refusal_is_that_of_a_binomial_distribution(capacity: int, num_buckets: int) -> None:
    keys = DynamicKeys(capacity=capacity)
    layout = keys.layout(64, num_buckets)
    room, share = layout.rows_per_bucket, Fraction(1, num_buckets)
    fits = sum(math.comb(capacity, held) * share**held * (1 - share) ** (capacity - held) for held in range(room + 1))
    assert keys.chance_of_refusal(layout) == pytest.approx(float(1 - fits**num_buckets), rel=1e-6)
    assert keys.chance_of_refusal(keys.layout(64, 1)) == 0


def test_the_text_has_alike_tables_once_and_an_estimate() -> None:
    job = job_of({f"t{at}": table(100, f"t{at}") for at in range(50)})
    profiles = ProfilesAtHand(tables=(PROFILE,) * 50, is_measured=True)
    text = render_step(counted(job), profiles)
    assert "50 tables: t0 ... t49" in text
    assert "GB/s of memory, and " in text
    assert "spread evenly" not in text
    alone = render_step(counted(job, num_hosts=1), replace(profiles, is_measured=False))
    assert "Gbit/s" not in alone
    assert "ids are taken to be spread evenly" in alone
