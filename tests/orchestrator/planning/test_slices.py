"""What a job needs on slices, against numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.table_plan import plan
from podembed.orchestrator.planning.slices import OnSlices, gradient_bytes, on_slices, render_slices
from podembed.workers.device.dense_half import initial
from podembed.workers.input.profile import profiles_at_hand
from podembed.workers.job.job import JobConfig
from tests.small_job import small_job

V6E = Topology.of("4x4", "TPU-V6E")


def counted(job: JobConfig, num_slices: int) -> OnSlices:
    hosts = num_slices * V6E.hosts
    placed = plan(job, num_hosts=hosts)
    profiles = profiles_at_hand(job, None).tables
    found = on_slices(job, placed, profiles, topology=V6E, num_slices=num_slices, sent_bytes=1e6)
    held = [host.shard_bytes for host in placed.hosts]
    assert found.held_bytes == max(held)
    assert found.all_bytes == sum(held)
    assert found.lost_bytes == max(sum(held[first : first + 4]) for first in range(0, hosts, 4))
    return found


@pytest.fixture
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data, audit=False)


def test_what_a_lost_slice_costs(job: JobConfig) -> None:
    two = counted(job, 2)
    assert (two.num_hosts, two.reading_hosts) == (8, 4)
    assert two.all_rows == 50 + 30_000 + 300
    assert 0 < two.lost_rows < two.all_rows
    # The only one takes all rows with it, and the one in its place reads them.
    one = counted(job, 1)
    assert (one.num_hosts, one.reading_hosts, one.lost_rows, one.lost_bytes) == (4, 4, one.all_rows, one.all_bytes)


def test_gradients_over_ici_and_dcn(job: JobConfig) -> None:
    params, _ = initial(job, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert gradient_bytes(job) == 4 * (count + 1)
    found = replace(counted(job, 2), gradient_bytes=16_000_000)
    # A ring of 16 chips: each sends 15 of 16 parts, twice. Then each of 4 chips swaps its part with one other slice.
    assert found.ici_bytes == 2 * 15 * 1_000_000
    assert found.dcn_gradient_bytes == 4 * 1_000_000
    assert replace(found, num_slices=4).dcn_gradient_bytes == 6_000_000
    assert replace(found, num_slices=1).dcn_gradient_bytes == 0


def test_the_text_has_the_counts(job: JobConfig) -> None:
    text = render_slices(replace(counted(job, 2), lost_bytes=4 << 30))
    assert "8, 4 a slice with 4 chips each" in text
    assert "1.0 GiB each\n" in text
    assert "no run has seen a TPU" in text
