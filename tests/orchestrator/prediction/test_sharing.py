"""Steps that can be followed by hand: with processors for all, with too few, behind devices, meetings and readers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.orchestrator.prediction.sharing import Followed, HostParts, Part, follow
from podembed.workers.liveness.progress import Phase

BESIDE = (
    Part(phase=Phase.DEDUP, cpu_s=1.0, posts="ids"),
    Part(phase=Phase.ID_EXCHANGE, cpu_s=0.5, awaits="ids"),
)
AFTER = (Part(phase=Phase.UPDATE, cpu_s=2.0),)
HOST = HostParts(machine=0, beside=BESIDE, after=AFTER, device_cpu_s=5.0)


def test_with_processors_for_all_a_host_works_beside_its_device() -> None:
    found = follow([HOST, HOST], cpus=4)
    assert found.step_s == pytest.approx(5.0 + 2.0)
    assert found.device_s == [pytest.approx(5.0)] * 2
    expected = {Phase.DEDUP: 1.0, Phase.ID_EXCHANGE: 0.5, Phase.DEVICE: 3.5, Phase.UPDATE: 2.0}
    for phases in found.phase_s:
        assert phases == pytest.approx(expected)


def test_with_half_of_them_both_take_twice_as_long_while_both_work() -> None:
    found = follow([HOST, HOST], cpus=2)
    # Host and device share a processor until the host is done after 3 s; 3.5 s of the device are left.
    assert found.step_s == pytest.approx(3.0 + 3.5 + 2.0)
    assert found.phase_s[0][Phase.DEDUP] == pytest.approx(2.0)
    assert found.phase_s[0][Phase.UPDATE] == pytest.approx(2.0)
    # All in all a machine does no more than it has processors for.
    assert follow([HOST, HOST], cpus=1).step_s == pytest.approx(2 * (1.5 + 5.0 + 2.0))
    assert follow([replace(HOST, machine=0), replace(HOST, machine=1)], cpus=1).step_s == pytest.approx(8.5)


def test_a_device_that_gets_more_makes_its_host_slower() -> None:
    found = follow([replace(HOST, device_weight=3.0)], cpus=1)
    # A quarter of the processor for 1.5 s of work.
    assert found.phase_s[0][Phase.DEDUP] + found.phase_s[0][Phase.ID_EXCHANGE] == pytest.approx(6.0)
    assert found.step_s == pytest.approx(8.5)


def test_hosts_wait_for_the_slowest_at_a_meeting() -> None:
    slow = replace(HOST, beside=(replace(BESIDE[0], cpu_s=4.0), BESIDE[1]))
    found = follow([HOST, slow], cpus=8)
    assert found.phase_s[0][Phase.ID_EXCHANGE] == pytest.approx(3.0 + 0.5)
    assert found.phase_s[1][Phase.ID_EXCHANGE] == pytest.approx(0.5)
    assert found.step_s == pytest.approx(5.0 + 2.0)


def test_devices_wait_for_the_slowest_of_them() -> None:
    found = follow([HOST, replace(HOST, device_cpu_s=9.0)], cpus=8)
    assert found.device_s == [pytest.approx(9.0)] * 2
    assert found.step_s == pytest.approx(11.0)


def test_with_staleness_the_device_hides_all_but_itself() -> None:
    found = follow([replace(HOST, is_ahead=True)], cpus=8)
    assert found.step_s == pytest.approx(5.0)


def test_a_reader_that_is_slower_than_a_step_is_waited_for() -> None:
    reads = replace(HOST, beside=(Part(phase=Phase.READ, cpu_s=0.0), *BESIDE), reading_s=9.0)
    found = follow([reads], cpus=8)
    assert found.step_s == pytest.approx(9.0)
    assert found.phase_s[0][Phase.READ] > 0
    hidden = follow([replace(reads, reading_s=6.0)], cpus=8)
    assert hidden.step_s == pytest.approx(7.0)
    # Without a processor of its own it takes one from the others.
    assert follow([replace(reads, reading_s=6.0)], cpus=1).step_s == pytest.approx(8.5 + 6.0, rel=0.02)


def test_several_threads_and_waits_without_a_processor() -> None:
    update = Part(phase=Phase.UPDATE, cpu_s=2.0, threads=2.0, delay_s=0.25)
    assert _update_s(follow([replace(HOST, after=(update,))], cpus=2)) == pytest.approx(1.25)
    assert _update_s(follow([replace(HOST, after=(update,))], cpus=1)) == pytest.approx(2.25)


def _update_s(found: Followed) -> float:
    return found.phase_s[0][Phase.UPDATE]


def test_hosts_that_await_what_nobody_posts_are_an_error() -> None:
    never = replace(HOST, after=(Part(phase=Phase.UPDATE, cpu_s=1.0, awaits="nothing"),))
    with pytest.raises(RuntimeError, match="wait for each other"):
        follow([never], cpus=1)


def test_a_host_that_was_woken_waits_for_its_turn_while_its_device_has_something_to_do() -> None:
    between = Part(phase=Phase.BETWEEN, cpu_s=1.0, turn_s=0.5)
    found = follow([replace(HOST, beside=(between,))], cpus=2)
    assert found.phase_s[0][Phase.BETWEEN] == pytest.approx(1.5)
    after = Part(phase=Phase.UPDATE, cpu_s=2.0, turn_s=0.5)
    assert _update_s(follow([replace(HOST, after=(after,))], cpus=2)) == pytest.approx(2.0)
