"""Two machines, a driver on a third, and links that fail in one direction or both, for seconds or for good: the silent
side is found and given up, nobody hangs, and the run ends with the bytes of one that was never disturbed.

The machines are namespaces with Ray nodes in them (`tests.network`). Where there can be none, the tests are skipped
with the reason. They take eight minutes, and run with `make faults`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.orchestrator.commit.lease_files import read_head, read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.workers.storage.store import Store
from tests.faults.network.partition_cluster import PATIENCE_S, Driver, PartedCluster, parted_cluster, workers_on
from tests.faults.network.partition_process import LEASE_TIMEOUT_S
from tests.jobs.cli.test_main import run
from tests.long_tests import is_long
from tests.network import why_not
from tests.orchestrator.driver.test_equality import expected_audit
from tests.processes import wait_for
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import small_job

pytestmark = [is_long, pytest.mark.ray, pytest.mark.slow]
STEPS = 150
JOINED_STEPS = 1500
FOUND_S = 10.0
STAYS_CUT_S = 4.0  # after the fault was found: the next generation has to come to terms with it, too
# Kernels repeat what was lost after 0.2, 0.4, 0.8, 1.6 s and so on, so that twice as long may pass until they have got
# through again.
OUTAGE_S = 2.0


@pytest.fixture(scope="module")
def possible() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(possible: None) -> Iterator[PartedCluster]:
    with parted_cluster(2, started=2) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(cluster: PartedCluster, small_data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run that nothing happens to says of its end."""
    driver = Driver(cluster, small_data, tmp_path_factory.mktemp("undisturbed"), max_steps=STEPS)
    try:
        return driver.result()
    finally:
        driver.end()


def step_of(url: str) -> int:
    return (parse_commit_name(read_head(Store(url)) or "") or (0, 0))[0]


def trains(driver: Driver) -> None:
    """Waits until the second commit stands."""

    def has_commits() -> bool:
        driver.check_alive()
        return step_of(driver.url) >= 20

    wait_for("second commit", has_commits, seconds=PATIENCE_S)


def finds(driver: Driver) -> float:
    """Seconds until the driver names a fault."""
    seconds = wait_for("notice of the fault", lambda: bool(driver.events("generation_lost")), seconds=60)
    print(f"found after {seconds:.1f} s: {driver.events('generation_lost')[0]['cause']}")
    assert seconds <= FOUND_S, driver.report()
    return seconds


def check_end(driver: Driver, expected: dict[str, Any], data: str) -> None:
    """The run ends as the undisturbed one, with a lineage that is whole and each sample trained once."""
    result = driver.result()
    print(driver.report())
    assert result["step"] == STEPS
    assert result["losses"] == expected["losses"]
    assert_same_bytes(committed_state(driver.url), committed_state(expected["path"]))
    check_lineage(driver.url, data)


def check_lineage(url: str, data: str) -> None:
    code, out, _ = run("fsck", url)
    assert code == 0, out
    names = [parse_commit_name(name) or (0, 0) for name in reversed(read_lineage(Store(url)))]
    assert names == sorted(names), "steps and generations only grow"
    audit = committed_state(url)["audit/rows"][:, 0]
    np.testing.assert_allclose(audit, expected_audit(small_job(folder=data, epochs=5000), step_of(url)), atol=1e-2)


def nobody_is_left(cluster: PartedCluster, *, seconds: float = 20.0) -> None:
    wait_for(
        "end of all worker processes",
        lambda: not any(workers_on(machine) for machine in cluster.machines),
        seconds=seconds,
    )


@pytest.mark.parametrize(
    "cuts",
    [
        [(1, 2), (2, 1)],
        [(1, 2)],
        [(0, 2)],
        [(2, 0)],
        [(0, 2), (2, 0), (1, 2), (2, 1)],
    ],
    ids=["hosts", "host-to-host", "driver-to-host", "host-to-driver", "host-from-all"],
)
def test_a_cut_link_costs_steps_and_nothing_else(
    cuts: list[tuple[int, int]], cluster: PartedCluster, undisturbed: dict[str, Any], small_data: str, tmp_path: Path
) -> None:
    driver = Driver(cluster, small_data, tmp_path, max_steps=STEPS)
    try:
        trains(driver)
        for sender, receiver in cuts:
            cluster.network.cut(sender, receiver)
        finds(driver)
        time.sleep(STAYS_CUT_S)
        cluster.network.heal()
        check_end(driver, undisturbed, small_data)
        nobody_is_left(cluster)
    finally:
        cluster.network.heal()
        driver.end()


def test_an_outage_of_seconds_is_borne(
    cluster: PartedCluster, undisturbed: dict[str, Any], small_data: str, tmp_path: Path
) -> None:
    driver = Driver(cluster, small_data, tmp_path, max_steps=STEPS)
    try:
        trains(driver)
        cluster.network.cut_off(2)
        time.sleep(OUTAGE_S)
        cluster.network.heal()
        check_end(driver, undisturbed, small_data)
        assert driver.events("generation_lost") == [], driver.report()
        nobody_is_left(cluster)
    finally:
        cluster.network.heal()
        driver.end()


@pytest.mark.parametrize("is_power_lost", [False, True], ids=["cut-off", "power-loss"])
def test_a_machine_that_stays_away_is_replaced(
    is_power_lost: bool, undisturbed: dict[str, Any], small_data: str, tmp_path: Path
) -> None:
    """It is found and given up, its processes end by themselves, and the run waits for another machine and goes on
    there.
    """
    with parted_cluster(3, started=2) as cluster:
        driver = Driver(cluster, small_data, tmp_path, max_steps=STEPS)
        try:
            trains(driver)
            lost = cluster.machines[2]
            assert workers_on(lost)
            if is_power_lost:
                cluster.network.lose_power(2)
            else:
                cluster.network.cut_off(2)
            finds(driver)
            wait_for("wait for a machine", lambda: bool(driver.events("hosts_awaited")), seconds=30)
            gone_s = wait_for(
                "end of the processes on the lost machine", lambda: not workers_on(lost), seconds=PATIENCE_S
            )
            print(f"its workers were gone {gone_s:.1f} s later")
            assert gone_s <= LEASE_TIMEOUT_S * 1.5 + 5.0
            cluster.start(3)
            check_end(driver, undisturbed, small_data)
            nobody_is_left(cluster)
        finally:
            driver.end()


def test_a_range_of_hosts_goes_on_with_those_that_are_left(possible: None, small_data: str, tmp_path: Path) -> None:
    """The link between two hosts is cut for good, both of which the driver reaches: one of them trains on."""
    with parted_cluster(2, started=2) as cluster:
        driver = Driver(cluster, small_data, tmp_path, max_steps=STEPS, hosts="1-2")
        try:
            trains(driver)
            cluster.network.cut(1, 2)
            cluster.network.cut(2, 1)
            finds(driver)
            result = driver.result()
            print(driver.report())
            assert result["step"] == STEPS
            check_lineage(driver.url, small_data)
            nobody_is_left(cluster)
        finally:
            driver.end()


def test_a_machine_that_joins_gets_its_buckets_from_the_host_that_has_them(
    possible: None, small_data: str, tmp_path: Path
) -> None:
    """Two machines share nothing but the storage and the network."""
    with parted_cluster(2, started=1) as cluster:
        driver = Driver(cluster, small_data, tmp_path, max_steps=JOINED_STEPS, hosts="1-2")
        try:
            trains(driver)
            cluster.start(2)
            wait_for("second host", lambda: bool(driver.events("hosts_changed")), seconds=PATIENCE_S)
            (change,) = driver.events("hosts_changed")
            assert (change["before"], change["after"]) == (1, 2)
            result = driver.result()
            print(driver.report())
            (start,) = [start for start in driver.events("generation_started") if start["restore"]["buckets_moved"]]
            assert start["restore"]["buckets_read"] == 0
            assert result["recoveries"] == []
            assert result["step"] == JOINED_STEPS
            check_lineage(driver.url, small_data)
            nobody_is_left(cluster)
        finally:
            driver.end()
