"""What events become in numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podembed.orchestrator.decisions.failure import FaultClass
from podembed.orchestrator.events.commits import Committed
from podembed.orchestrator.events.run import GenerationLost, GenerationStarted, NothingLeft
from podembed.tools.metrics.measurer import MOST_RATES, Measurer
from podembed.tools.metrics.point import Point
from podembed.workers.host.row_norms import TableNorms
from podembed.workers.job.window_figures import DenseNorms, figures_of
from tests.clock import FakeClock
from tests.tools.metrics.windows import recovery, window
from tests.workers.job.counts import counts


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def measurer(clock: FakeClock) -> Measurer:
    return Measurer(monotonic_s=clock.monotonic_s, wall_s=clock.wall_s)


def told(measurer: Measurer, event: object) -> Point:
    point = measurer.point(event)  # type: ignore[arg-type]
    assert point is not None
    return point


def test_a_window_gives_its_rates_and_what_each_host_waited_for(measurer: Measurer) -> None:
    point = told(measurer, window(10, 20, seconds=2.0))
    assert (point.generation, point.first_step, point.step) == (1, 10, 20)
    assert point.value("samples_per_second") == pytest.approx(320)
    assert point.value("step_seconds") == pytest.approx(0.2)
    assert point.value("phase_seconds", host="1", phase="pool") == pytest.approx(0.08)
    waited = {source: point.value("waited_ratio", host="0", source=source) for source in ("input", "device", "hosts")}
    assert waited == pytest.approx({"input": 0.1, "device": 0.2, "hosts": 0.3})
    assert point.value("requested_rows", table="clicks") == pytest.approx(10)
    assert point.value("memory_bytes", host="0") == 100


def test_tables_that_hosts_looked_at(measurer: Measurer) -> None:
    seen = TableNorms(table="clicks", num_rows=8, num_trained=6, norms=(1.0, 2.0, 3.0), growth=(0.1, 0.2, 0.3))
    untold = TableNorms(table="untold", num_rows=8, num_trained=None, norms=())
    point = told(measurer, window(0, 10, tables=(seen, untold)))
    assert point.value("table_trained_ratio", table="clicks") == 0.75
    assert point.value("table_row_norm", table="clicks", quantile="0.9") == 3.0
    assert point.value("table_row_growth", table="clicks", quantile="0.5") == 0.2
    assert point.value("table_row_norm", table="untold", quantile="0.5") is None
    assert point.by_label("table_trained_ratio", "table") == {"clicks": 0.75}


def test_counters_grow_and_processor_time_is_that_between_two_windows(measurer: Measurer) -> None:
    first = told(measurer, window(0, 10, cpu_s=3.0))
    assert first.value("samples_per_cpu_second") is None, "time before the window is not of the window"
    second = told(measurer, window(10, 20, cpu_s=5.0))
    assert second.value("samples") == 1280
    assert second.value("sent_bytes", host="1") == 2000
    assert second.value("samples_per_cpu_second") == pytest.approx(640 / (2 * 2.0))


def test_a_new_process_begins_its_processor_time_anew(measurer: Measurer) -> None:
    told(measurer, window(0, 10, cpu_s=30.0))
    point = told(measurer, window(10, 20, cpu_s=1.0, process=8))
    assert point.value("samples_per_cpu_second") is None
    assert point.value("cpu_seconds", host="0") == 31, "a counter never falls"


def test_goodput_leaves_out_what_a_fault_took_back(measurer: Measurer, clock: FakeClock) -> None:
    told(measurer, window(0, 10, seconds=2.0))
    told(measurer, Committed(name="c", step=10, size_bytes=5, seconds=0.1))
    told(measurer, window(10, 20, seconds=2.0))
    told(measurer, window(20, 30, seconds=2.0))
    told(measurer, recovery(base_step=10, generation=2, discarded_steps=20))
    clock.now_s += 10
    point = told(measurer, window(10, 20, generation=2, seconds=1.0))
    assert point.value("goodput_ratio") == pytest.approx(3.0 / 10.0)


def test_what_faults_count_begins_at_zero_once(measurer: Measurer) -> None:
    started = GenerationStarted(
        generation=3, num_hosts=1, commit="c", base_step=40, start_s=1.0, compile_s=1.0, survivors=0, restore={}
    )
    point = told(measurer, started)
    assert (point.generation, point.first_step, point.step) == (3, 40, 40)
    assert {*point.by_label("lost_steps", "cause")} == {
        kind.name.lower() for kind in FaultClass if kind is not FaultClass.REFUSAL
    }
    assert {one.value for one in point.measurements} == {0}
    assert {one.metric.kind for one in point.measurements} == {"counter"}
    assert measurer.point(started) is None


def test_lost_steps_are_charged_to_the_fault(measurer: Measurer) -> None:
    told(measurer, window(0, 10))
    fault = GenerationLost(generation=1, cause="host 1 ended", workers=("host 1",), fault="host", base_step=0)
    assert measurer.point(fault) is None
    point = told(measurer, recovery(base_step=0, generation=2, discarded_steps=10))
    assert point.value("lost_steps", cause="host") == 10
    assert point.value("recoveries", cause="host") == 1
    assert point.value("recovery_seconds") == pytest.approx(3.75)
    assert (point.generation, point.step) == (2, 0)


def test_events_without_numbers_give_no_point(measurer: Measurer) -> None:
    assert measurer.point(NothingLeft(url="file:///a", step=3, commit="c")) is None


def test_a_window_has_the_figures_of_its_scores(measurer: Measurer) -> None:
    scores, labels = np.asarray([2.0, 1.0, -1.0]), np.asarray([1.0, 0.0, 0.0])
    norms = DenseNorms(gradient=3.0, update=0.5, params=10.0, largest_gradient=4.0)
    point = told(measurer, window(0, 10, figures=figures_of([[counts(scores, labels)]]), norms=norms))
    assert point.value("window_auc", task="click") == 1
    assert point.value("window_positives", task="click") == 1
    assert point.value("dense_update_norm") == 0.5
    assert told(measurer, window(10, 20)).value("window_auc", task="click") is None
    # A window without an eighth step.
    point = told(measurer, window(20, 22, norms=replace(norms, update=None, params=None)))
    assert (point.value("dense_gradient_norm"), point.value("dense_update_norm")) == (3.0, None)


def test_a_learning_rate_is_measured_where_it_changed(measurer: Measurer) -> None:
    def rates(first: int, generation: int = 1, **by_table: float) -> dict[str, float]:
        point = told(measurer, window(first, first + 10, generation=generation, rates=by_table))
        return point.by_label("learning_rate", "table")

    assert rates(0, clicks=0.1, users=0.2) == {"clicks": 0.1, "users": 0.2}
    assert rates(10, clicks=0.05, users=0.2) == {"clicks": 0.05}
    told(measurer, recovery(base_step=10, generation=2, discarded_steps=10))
    assert rates(10, 2, clicks=0.05, users=0.2) == {"clicks": 0.05, "users": 0.2}
    many = {f"t{at}": 0.1 for at in range(200)}
    assert list(rates(20, 2, **many)) == list(many)[:MOST_RATES]
