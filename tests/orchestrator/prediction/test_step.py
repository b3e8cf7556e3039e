"""Predicted steps: sums that can be followed by hand, waits for the slowest host, and pods of thousands of hosts."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.costs.profile import even_profile
from podembed.embedding.costs.work import TableWay
from podembed.embedding.optimizers import SGD
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand
from podembed.orchestrator.prediction.step import predict
from podembed.workers.calibration.record import Correction, Machine, PodCorrections, Waiting
from podembed.workers.liveness.progress import Phase
from tests.workers.calibration.constants import CALIBRATION, CORRECTIONS

ROOMY = replace(CALIBRATION, machine=Machine(processor="testing", cpus=64), kernels=CALIBRATION.kernels[:1])
SLOW, QUICK = DenseHalf(step_s=1.0, sample_s=0.0), DenseHalf(step_s=0.0, sample_s=0.0)
SETTING = Setting(num_hosts=2, batch_size=2000, hosts_a_machine=2, reads_files=False)


def table(way: TableWay, owner: int | None = None, *, at: int = 0, rows: int = 1000) -> TableDemand:
    spec = TableSpec.of(TableConfig(rows, 16, name=f"t{at}", optimizer=SGD(0.1)), seed=0)
    profile = even_profile(ids_per_sample=[5.0], num_rows=rows, batch_size=SETTING.batch_size)
    return TableDemand(spec=spec, way=way, owner=owner, num_features=1, num_divided=0, profile=profile)


@pytest.mark.parametrize("way", list(TableWay))
@pytest.mark.parametrize("dense", [SLOW, QUICK])
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_phases_add_up_to_the_step(way: TableWay, dense: DenseHalf, staleness: int) -> None:
    tables = [table(way, 0 if way is TableWay.WHOLE else None)]
    found = predict(tables, replace(SETTING, staleness=staleness), calibration=ROOMY, dense=dense)
    assert sum(found.phase_s.values()) == pytest.approx(found.step_s, rel=0.05)
    assert found.samples_per_s == pytest.approx(2000 / found.step_s)
    assert set(found.phase_s) <= set(Phase)


def test_a_host_without_tables_waits_for_the_one_that_has_them() -> None:
    owned_here = predict([table(TableWay.WHOLE, 0)], SETTING, calibration=ROOMY, dense=QUICK)
    owned_there = predict([table(TableWay.WHOLE, 1)], SETTING, calibration=ROOMY, dense=QUICK)
    assert owned_here.step_s == pytest.approx(owned_there.step_s)
    assert owned_here.phase_s[Phase.UPDATE] > 0
    assert owned_there.phase_s.get(Phase.UPDATE, 0.0) < owned_here.phase_s[Phase.UPDATE]
    # 10 µs for each of two calls, 10 ns for each of 10,000 ids, in each of two hosts' bags.
    assert owned_here.phase_s[Phase.GROUP] == pytest.approx(2e-5 + 1e-4 + 2e-5, rel=0.2)


def test_work_beside_a_device_is_hidden_where_there_are_processors_for_both() -> None:
    tables = [table(TableWay.WHOLE, 0), table(TableWay.WHOLE, 1, at=1)]
    alone = predict(tables, SETTING, calibration=ROOMY, dense=QUICK).step_s
    device = DenseHalf(step_s=alone, sample_s=0.0)
    roomy = predict(tables, SETTING, calibration=ROOMY, dense=device).step_s
    crowded = replace(ROOMY, machine=Machine(processor="testing", cpus=2))
    shared = predict(tables, SETTING, calibration=crowded, dense=device).step_s
    assert roomy < 1.9 * alone
    assert shared > roomy


def test_staleness_hides_more_behind_the_device() -> None:
    tables = [table(TableWay.WHOLE, 0), table(TableWay.WHOLE, 1, at=1)]
    device = DenseHalf(step_s=2e-3, sample_s=0.0)
    plain = predict(tables, SETTING, calibration=ROOMY, dense=device)
    stale = predict(tables, replace(SETTING, staleness=1), calibration=ROOMY, dense=device)
    assert stale.step_s < plain.step_s


def test_vectors_cross_the_network_between_machines_alone() -> None:
    tables = [table(TableWay.WHOLE, 0)]
    near = predict(tables, SETTING, calibration=ROOMY, dense=QUICK)
    far = predict(tables, replace(SETTING, hosts_a_machine=1), calibration=ROOMY, dense=QUICK)
    half = predict(tables, replace(SETTING, hosts_a_machine=1, wire_bytes=2), calibration=ROOMY, dense=QUICK)
    # Half of 1,000 vectors of 16 floats a host, there and back.
    assert far.sent_bytes - near.sent_bytes == pytest.approx(2 * 4 * 500 * 16)
    assert half.sent_bytes - near.sent_bytes == pytest.approx(2 * 2 * 500 * 16)


def test_on_one_machine_a_hosts_own_bags_are_pooled_with_those_of_the_others() -> None:
    tables, far = [table(TableWay.WHOLE, 0)], replace(SETTING, hosts_a_machine=1)
    near_s, far_s = (predict(tables, one, calibration=ROOMY, dense=QUICK).phase_s for one in (SETTING, far))
    assert Phase.POOL not in near_s
    assert near_s[Phase.POOL_FOR_OTHERS] == pytest.approx(far_s[Phase.POOL_FOR_OTHERS] + far_s[Phase.POOL])
    alone = replace(SETTING, num_hosts=1)
    assert Phase.POOL_FOR_OTHERS not in predict(tables, alone, calibration=ROOMY, dense=QUICK).phase_s


def test_reading_that_is_slower_than_a_step_is_waited_for() -> None:
    slow = replace(ROOMY, sample_s=1e-3)
    found = predict([table(TableWay.PARTIAL)], replace(SETTING, reads_files=True), calibration=slow, dense=QUICK)
    assert found.phase_s[Phase.READ] > 0.5
    assert found.step_s >= 1.0


def test_thousands_of_hosts_take_no_time_to_predict() -> None:
    tables = [table(TableWay.WHOLE, at * 20, at=at) for at in range(200)]
    setting = Setting(num_hosts=4096, batch_size=65536)
    began = time.process_time()
    predict(tables, setting, calibration=ROOMY, dense=QUICK)
    assert time.process_time() - began < 5.0


def test_runs_of_made_up_jobs_correct_what_was_measured_alone() -> None:
    tables = [table(TableWay.PARTIAL)]
    device = DenseHalf(step_s=1e-3, sample_s=0.0)
    plain = predict(tables, SETTING, calibration=ROOMY, dense=device)
    found = predict(tables, SETTING, calibration=replace(ROOMY, pods=(CORRECTIONS,)), dense=device)
    assert found.phase_s[Phase.UPDATE] == pytest.approx(2 * plain.phase_s[Phase.UPDATE] + 1e-3)
    assert found.phase_s[Phase.GROUP] == pytest.approx(plain.phase_s[Phase.GROUP])
    # 10 µs for each of its calls, one for each part of two hosts.
    assert found.phase_s[Phase.DEDUP] == pytest.approx(plain.phase_s[Phase.DEDUP] + 2e-5)
    assert found.phase_s[Phase.BETWEEN] == pytest.approx(5e-4)
    assert found.device_s == pytest.approx(plain.device_s + 2e-3 + 3e-4)
    assert found.phase_s[Phase.ID_EXCHANGE] == pytest.approx(plain.phase_s[Phase.ID_EXCHANGE] + 1e-4)
    assert sum(found.phase_s.values()) == pytest.approx(found.step_s)


def test_decoding_takes_processors_from_steps_where_they_are_short() -> None:
    tables = [table(TableWay.PARTIAL)]
    one = replace(ROOMY, machine=Machine(processor="testing", cpus=1))
    plain = predict(tables, SETTING, calibration=one, dense=QUICK)
    reads = replace(SETTING, reads_files=True, read_sample_s=1e-6)
    # A millisecond on each of two hosts.
    assert predict(tables, reads, calibration=one, dense=QUICK).step_s == pytest.approx(plain.step_s + 2e-3)
    twice = replace(one, pods=(replace(CORRECTIONS, phases={}, device=Correction(), waiting=Waiting(), reading=2.0),))
    assert predict(tables, reads, calibration=twice, dense=QUICK).step_s == pytest.approx(plain.step_s + 4e-3)
    roomy = predict(tables, reads, calibration=ROOMY, dense=QUICK)
    assert roomy.step_s < plain.step_s + 1e-3


def test_threads_make_kernels_faster_and_not_what_python_does() -> None:
    tables = [table(TableWay.PARTIAL)]
    fix = PodCorrections(
        hosts=1,
        phases={"update": Correction(constant_s=1e-3), "dedup": Correction()},
        device=Correction(),
        waiting=Waiting(),
        reading=1.0,
    )
    known = replace(ROOMY, pods=(fix,))
    one = predict(tables, SETTING, calibration=known, dense=QUICK)
    two = predict(tables, replace(SETTING, threads=2), calibration=known, dense=QUICK)
    kernels_s = one.phase_s[Phase.UPDATE] - 1e-3
    assert two.phase_s[Phase.UPDATE] == pytest.approx(1e-3 + kernels_s / 2)
    assert two.phase_s[Phase.DEDUP] == pytest.approx(one.phase_s[Phase.DEDUP])


def test_what_cold_caches_cost_grows_with_what_a_step_touches() -> None:
    fix = PodCorrections(
        hosts=1, phases={"update": Correction(cold_s=1e-3)}, device=Correction(), waiting=Waiting(), reading=1.0
    )
    cold, warm = replace(ROOMY, pods=(fix,)), replace(ROOMY, pods=(replace(fix, phases={}),))

    def more_s(tables: list[TableDemand], setting: Setting = SETTING) -> float:
        with_it, without = (predict(tables, setting, calibration=found, dense=QUICK) for found in (cold, warm))
        return with_it.phase_cpu_s[Phase.UPDATE] - without.phase_cpu_s[Phase.UPDATE]

    one, many = more_s([table(TableWay.PARTIAL)]), more_s([table(TableWay.PARTIAL)] * 50)
    assert 0 < one < many < 1e-3
    assert more_s([table(TableWay.PARTIAL)], replace(SETTING, batch_size=64 * SETTING.batch_size)) > one
