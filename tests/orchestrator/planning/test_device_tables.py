"""Predictions for tables on devices: hosts do nothing for them, and host tables are proposed where that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam, CustomRowOptimizer
from podembed.orchestrator.decisions.table_plan import plan, render, summary
from podembed.orchestrator.prediction.choices import TableChoice, table_choices
from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand
from podembed.orchestrator.prediction.forecast import demands, forecast, setting_of
from podembed.orchestrator.prediction.on_devices.exchanged import exchanged_bytes, ids_per_bag
from podembed.orchestrator.prediction.on_devices.proposal import (
    MOST_PROPOSED_BYTES,
    Proposal,
    candidates,
    proposal,
    render_proposal,
)
from podembed.orchestrator.prediction.step import predict
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.input.profile import assumed_profiles
from podembed.workers.job.job import JobConfig
from podembed.workers.job.on_devices.moved import on_devices
from tests.small_job import SmallModel
from tests.workers.calibration.constants import CALIBRATION

BATCH, DIM = 64, 8
DENSE = DenseHalf(step_s=1e-4, sample_s=0.0)


def job_of(tables: dict[str, TableConfig], *, staleness: int = 0) -> JobConfig:
    return JobConfig(
        name="predicted",
        features={name: FeatureConfig(table) for name, table in tables.items()},
        model=SmallModel(),
        data=ParquetData("none", label="label", features={name: IdColumn(name) for name in tables}),
        batch_size=BATCH,
        num_lanes=8,
        staleness=staleness,
    )


def table(rows: int, name: str, **options: object) -> TableConfig:
    return TableConfig(rows, DIM, name=name, combiner="sum", **{"optimizer": Adagrad(0.1), **options})  # pyright: ignore[reportArgumentType]


def setting(job: JobConfig, num_hosts: int = 2) -> Setting:
    return setting_of(job, num_hosts=num_hosts, hosts_a_machine=1, reads_files=False)


def found_in(job: JobConfig, lengths: list[float]) -> tuple[list[TableDemand], tuple[TableChoice, ...]]:
    placed = plan(job, num_hosts=2)
    asked = demands(job, placed, assumed_profiles(job, lengths))
    whys = [one.why for one in placed.tables]
    return asked, table_choices(asked, setting(job), whys=whys, calibration=CALIBRATION)


PAIR = {"small": table(100, "small"), "large": table(200_000, "large")}


def test_hosts_do_nothing_for_a_table_on_the_devices() -> None:
    """The step of hosts is that of the job without the table, and memory is that of the job with it."""
    both, alone = job_of(PAIR), job_of({"large": PAIR["large"]})
    moved = on_devices(both, ["small"])
    assert not both.tables[0].is_on_devices
    (away, of_large), costs = found_in(moved, [5.0, 3.0])
    assert away.is_on_devices
    assert (costs[0].cost.host_s, costs[0].cost.sent_bytes) == (0.0, 0.0)
    expected, _ = found_in(alone, [3.0])
    step = predict([away, of_large], setting(moved), calibration=CALIBRATION, dense=DENSE)
    without = predict(expected, setting(alone), calibration=CALIBRATION, dense=DENSE)
    assert step.sent_bytes == without.sent_bytes > 0
    assert step.step_s == pytest.approx(without.step_s)
    with_it = predict(found_in(both, [5.0, 3.0])[0], setting(both), calibration=CALIBRATION, dense=DENSE)
    assert with_it.step_s > step.step_s

    def memory(job: JobConfig) -> int:
        return forecast(
            job,
            setting(job),
            assumed_profiles(job, [5.0, 3.0]),
            plan=lambda hosts: plan(job, num_hosts=hosts),
            calibration=CALIBRATION,
            dense=DENSE,
            undo_share=0.1,
        ).memory.table_bytes

    # Hosts keep what was committed.
    assert memory(moved) == memory(both)


def test_the_plan_says_what_lies_on_the_devices() -> None:
    job = on_devices(job_of(PAIR), ["small"])
    found = plan(job, num_hosts=2)
    (line,) = [line for line in render(found).splitlines() if line.split()[:1] == ["small"]]
    assert "all devices" in line
    assert line.endswith("place='device'; each holds all of it, hosts keep what was committed")
    # 100 rows of 8 floats, and as many accumulators.
    assert "6.2 KiB" in line
    assert "1 on the devices, 6.2 KiB on each" in summary(found)
    assert sum(host.num_pooled for host in found.hosts) == 0
    assert "hosts send nothing for tables on the devices" in render(found)
    assert "devices" not in render(plan(job_of(PAIR), num_hosts=2))


def test_what_devices_exchange_follows_from_rows_and_bags() -> None:
    job = on_devices(job_of({"few": table(10, "few"), "many": table(5_000, "many")}), ["few", "many"])
    # Sums of 10 rows with their counts; and half of 64 gradients with room for 4 ids each.
    assert exchanged_bytes(job, {"few": 1.0, "many": 3.0}) == 4 * 10 * (DIM + 1) + 4 * BATCH * (DIM + 4) / 2
    assert ids_per_bag(job, assumed_profiles(job, [2.0, 3.0])) == {"few": 2.0, "many": 3.0}
    whole = on_devices(job_of({"all": table(5_000, "all", optimizer=Adam(0.01, lazy_adam=False))}), ["all"])
    assert exchanged_bytes(whole, {}) == 4 * 5_000 * (DIM + 1)
    read = on_devices(job_of({"read": table(10, "read", trainable=False)}), ["read"])
    assert exchanged_bytes(read, {}) == 0.0


def test_busy_tables_that_fit_are_candidates() -> None:
    """Those that save most a byte come first. What may not lie there is left out, and so is what hosts hardly feel."""
    rows = MOST_PROPOSED_BYTES // (2 * 4 * DIM)
    job = job_of(
        {
            "large": table(rows, "large"),
            "small": table(100, "small"),
            "larger": table(rows // 2, "larger"),
            "idle": table(100, "idle"),
            "own_rule": table(100, "own_rule", optimizer=CustomRowOptimizer(lambda rows, gradients, rate: rows)),
        }
    )
    _, costs = found_in(job, [2.0, 2.0, 2.0, 1.0, 2.0])
    idle = replace(costs[3], costs=tuple((way, replace(cost, host_s=1e-9)) for way, cost in costs[3].costs))
    costs = (*costs[:3], idle, costs[4])
    assert candidates(job, costs) == ("small", "larger")
    assert candidates(on_devices(job, ["small"]), costs) == ("larger",)
    stale = job_of(PAIR, staleness=1)
    assert candidates(stale, found_in(stale, [1.0, 1.0])[1]) == ()


def test_a_table_is_proposed_only_where_the_devices_gain_less_than_hosts_save() -> None:
    job = job_of({"small": table(100, "small", optimizer=SGD(0.1)), "large": PAIR["large"]})
    asked, costs = found_in(job, [5.0, 3.0])

    def worth(device_s: float) -> Proposal:
        return proposal(
            job,
            ("small",),
            asked,
            costs,
            setting(job),
            calibration=CALIBRATION,
            dense=DENSE,
            dense_with=replace(DENSE, step_s=DENSE.step_s + device_s),
        )

    good, bad = worth(0.0), worth(1.0)
    assert good.pays
    assert not bad.pays
    (one,) = good.tables
    assert (one.name, one.device_bytes) == ("small", 100 * DIM * 4)
    assert one.host_s == costs[0].cost.host_s
    assert one.sent_bytes == costs[0].cost.sent_bytes > 0
    text = render_proposal(good)
    assert "place='device' pays for" in text
    assert "each device holds 3.1 KiB more of rows and slots" in text
    assert f"{1e3 * one.host_s:.3f}" in text
    refused = render_proposal(bad)
    assert refused.startswith("place='device' does not pay for small: predicted ")
    assert refused.count("\n") == 0
