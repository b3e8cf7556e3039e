"""The page has the alarms of the code, and every detector's alarms are in the table."""

from __future__ import annotations

from pathlib import Path

from podembed.tools.health.alarms import ALARMS
from podembed.tools.health.watch import DETECTORS

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"


def test_the_page_has_every_alarm() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("| alarm | begins when |")[2].partition("\n\n")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{alarm.name}` | {alarm.begins} | {alarm.remedy} |" for alarm in ALARMS.values()]


def test_every_alarm_has_one_detector() -> None:
    found = [name for make in DETECTORS for name in make().alarms]
    assert sorted(found) == sorted(ALARMS)
