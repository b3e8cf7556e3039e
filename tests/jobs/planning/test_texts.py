"""What `podembed plan` says of a step and of memory."""

from __future__ import annotations

from dataclasses import replace

from podembed.embedding.optimizers import SGD
from podembed.jobs.planning.data_at_hand import ProfilesAtHand
from podembed.jobs.planning.memory import PROCESS_BYTES, host_memory, render_memory
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
