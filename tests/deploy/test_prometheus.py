"""`deploy/prometheus`: an alert for each alarm, of a series that the program serves."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request
from typing import Any

import pytest
import yaml

from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan, AlarmEnded
from podembed.orchestrator.events.progress import HostKeepsUp, HostSlow
from podembed.orchestrator.events.run import GenerationStarted
from podembed.tools.health.alarms import ALARMS
from podembed.tools.health.watch import HealthWatch
from podembed.tools.metrics.measurer import Measurer
from podembed.tools.metrics.point import POINT, StreamLine
from podembed.tools.metrics.prometheus import PrometheusSink
from podembed.workers.liveness.progress import Phase
from tests.architecture.test_imports import ROOT
from tests.clock import FakeClock

FILE = ROOT / "deploy" / "prometheus" / "podembed.rules.yaml"
PROMTOOL = shutil.which("promtool")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(FILE.read_text("utf-8"))["groups"]
    return group["rules"]


def served(*events: Event) -> dict[str, float]:
    """What Prometheus scrapes of alarms after these events, by alarm and subject."""
    clock = FakeClock()
    measurer = Measurer(monotonic_s=clock.monotonic_s, wall_s=clock.wall_s, severities=HealthWatch().severities)
    sink = PrometheusSink(0, run="clicks", monotonic_s=clock.monotonic_s, address="127.0.0.1")
    began = GenerationStarted(
        generation=1, num_hosts=2, commit=None, base_step=0, start_s=1.0, compile_s=1.0, survivors=0, restore={}
    )
    for event in (began, *events):
        point = measurer.point(event)
        assert point is not None
        sink.write(StreamLine(kind=POINT, unix_s=0.0, values={}, point=point))
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.listen()}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    sink.close()
    found = {}
    for line in lines:
        if line.startswith("podembed_alarm{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            assert labels["run"] == "clicks"
            assert labels["severity"] == ALARMS[labels["alarm"]].severity
            found[f"{labels['alarm']} {labels['subject']}".strip()] = float(line.rsplit(" ", 1)[1])
    return found


def test_each_alert_says_what_its_alarm_says() -> None:
    for rule, alarm in zip(rules(), ALARMS.values(), strict=True):
        assert rule["alert"] == f"Podembed{''.join(word.capitalize() for word in alarm.name.split('_'))}"
        assert rule["labels"] == {"severity": alarm.severity}
        summary = f"{alarm.name} in run {{{{ $labels.run }}}} {{{{ $labels.subject }}}}"
        assert rule["annotations"] == {
            "summary": summary,
            "description": f"Begins when: {alarm.begins}. {alarm.remedy}",
        }


def test_each_alarm_has_an_alert_of_a_series_that_a_run_serves_from_its_beginning() -> None:
    series = served()
    asked = [re.fullmatch(r'podembed_alarm\{alarm="(\w+)"\} == 1', str(rule["expr"])) for rule in rules()]
    assert [one and one[1] for one in asked] == list(ALARMS)
    assert series == dict.fromkeys(ALARMS, 0.0)
    assert len({str(rule["alert"]) for rule in rules()}) == len(ALARMS)


def test_a_series_is_one_while_its_alarm_stands() -> None:
    began = AlarmBegan(
        alarm="evaluation_falls", subject="auc", step=10, is_note=False, finding="it falls", remedy="Stop early."
    )
    slow = HostSlow(host=1, ratio=2.0, phase=Phase.POOL, phase_s=2.0, others_phase_s=1.0)
    series = served(began, slow)
    assert (series["evaluation_falls auc"], series["slow_host host 1"]) == (1.0, 1.0)
    series = served(began, slow, AlarmEnded(alarm="evaluation_falls", subject="auc", step=20), HostKeepsUp(host=1))
    assert set(series.values()) == {0.0}


@pytest.mark.skipif(PROMTOOL is None, reason="found no promtool; install Debian's package prometheus")
def test_prometheus_takes_the_file() -> None:
    subprocess.run([str(PROMTOOL), "check", "rules", str(FILE)], check=True)
