"""What a step asks of tables, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad
from podembed.jobs.planning.memory import host_memory
from podembed.jobs.planning.step import sent_bytes
from podembed.jobs.planning.tables import render_tables
from podembed.orchestrator.decisions.table_plan import plan, summary
from podembed.orchestrator.planning.traffic import TableTraffic, traffic_of
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.input.table_profile import TableProfile
from podembed.workers.job.job import JobConfig
from tests.small_job import SmallModel

BATCH, DIM = 64, 8
# Two ids a sample. A host's share of 32 samples names 20 rows, and the batch names 30.
PROFILE = TableProfile(ids_per_sample=(2.0,), distinct=((32.0, 20.0), (64.0, 30.0)), hot_share=1.0)


def job_of(tables: dict[str, TableConfig], **options: object) -> JobConfig:
    job = JobConfig(
        name="planned",
        features={name: FeatureConfig(table) for name, table in tables.items()},
        model=SmallModel(),
        data=ParquetData("none", label="label", features={name: IdColumn(name) for name in tables}),
        batch_size=BATCH,
        num_lanes=8,
    )
    return replace(job, **options)  # pyright: ignore[reportArgumentType]


def table(rows: int, name: str, **options: object) -> TableConfig:
    return TableConfig(rows, DIM, name=name, combiner="sum", **{"optimizer": Adagrad(0.1), **options})  # pyright: ignore[reportArgumentType]


def counted(job: JobConfig, *, num_hosts: int = 2) -> list[TableTraffic]:
    return traffic_of(job, plan(job, num_hosts=num_hosts), [PROFILE] * len(job.tables))


def lying(one: TableTraffic, *, hosts: tuple[int, ...], is_pooled: bool) -> TableTraffic:
    return replace(one, table=replace(one.table, hosts=hosts, is_pooled=is_pooled))


def test_bytes_of_each_way_are_counted() -> None:
    (one,) = counted(job_of({"t": table(100, "t")}))
    assert (one.bags, one.ids, one.host_rows, one.all_rows) == (32, 64, pytest.approx(20), pytest.approx(30))
    # Half of a host's bags go to the other host: ids of 4 bytes, ends of bags of 8; and vectors both ways.
    whole, vectors = lying(one, hosts=(0,), is_pooled=True), 2 * 4 * 32 * DIM
    assert (whole.way, whole.sent_bytes) == ("whole", (4 * 64 + 8 * 32 + vectors) / 2)
    # Each owner has half of the ids of all bags, and answers for each bag.
    cut = lying(one, hosts=(0, 1), is_pooled=True)
    assert (cut.way, cut.sent_bytes) == ("owners pool", (4 * 64 + 2 * 8 * 32 + 2 * vectors) / 2)
    rows = lying(one, hosts=(0, 1), is_pooled=False)
    assert (rows.way, rows.sent_bytes) == ("rows travel", pytest.approx(20 * (8 + 2 * 4 * DIM) / 2))
    assert sent_bytes([whole, rows]) == whole.sent_bytes + rows.sent_bytes
    # Vectors of 64 ids twice, and 15 rows with as many accumulators.
    assert one.touched_bytes == pytest.approx(4 * (2 * 64 * DIM + 15 * 2 * DIM))


def test_half_as_many_bytes_travel_as_bfloat16_and_none_to_oneself() -> None:
    job = job_of({"t": table(100, "t")})
    (wide,), (narrow,) = counted(job), counted(replace(job, wire_dtype="bfloat16"))
    assert wide.sent_bytes - narrow.sent_bytes == 2 * 2 * 16 * DIM
    assert [one.sent_bytes for one in counted(job, num_hosts=1)] == [0.0]


def test_hosts_do_nothing_for_a_table_on_the_devices_and_hold_its_rows() -> None:
    tables = {"small": table(100, "small"), "large": table(2_000, "large")}
    on_hosts = job_of(tables)
    moved = job_of({**tables, "small": table(100, "small", place="device")})
    away, large = counted(moved)
    assert (away.way, away.sent_bytes, away.touched_bytes) == ("on devices", 0.0, 0.0)
    assert large.sent_bytes == counted(on_hosts)[1].sent_bytes > 0
    memory = [
        host_memory(job, plan(job, num_hosts=2), counted(job), undo_share=0.1).table_bytes for job in (on_hosts, moved)
    ]
    assert memory[0] == memory[1]


def test_the_plan_says_what_lies_on_the_devices() -> None:
    job = job_of({"small": table(100, "small", place="device"), "large": table(200_000, "large")})
    found = plan(job, num_hosts=2)
    (line,) = [line for line in render_tables(found).splitlines() if line.split()[:1] == ["small"]]
    assert "all devices" in line
    assert line.endswith("place='replicated'; each holds all of it, hosts keep what was committed")
    # 100 rows of 8 floats, as many accumulators, and a byte each that says whether it changed.
    assert "6.3 KiB" in line
    assert "1 on the devices, 6.3 KiB on each" in summary(found)
    assert sum(host.num_pooled for host in found.hosts) == 0
    assert "hosts send nothing for tables on the devices" in render_tables(found)
    assert not found.messages


def test_the_plan_says_what_devices_send_each_other_about_sharded_tables() -> None:
    names = {"many": 200_000, "more": 90_000, "few": 3}
    job = job_of({name: table(size, name, place="sharded") for name, size in names.items()})
    (found,) = plan(job, num_hosts=2, parts_per_host=4).messages
    assert found.tables == ("many", "more", "few")
    # An eighth of the ids of an eighth of the batch, of the third table at most its three rows; and a margin.
    ids = job.batch_size / 8
    expected = 2 * ids / 8 + 3 / 4
    assert expected + 4 * expected**0.5 < found.room < 3 * expected + 8 * expected**0.5 + 8
    assert found.sent_bytes == 7 * found.room * 2 * (4 + 4 * 8)
    text = render_tables(plan(job, num_hosts=2, parts_per_host=4))
    assert f"3 tables, many ... few: if all ids differ, a message between two devices has room for {found.room}" in text
