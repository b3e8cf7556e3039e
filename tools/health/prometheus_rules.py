"""`text`: a rules file of Prometheus with an alert for each alarm, made here so that its queries cannot go stale.

Usage: `python -m podembed.tools.health.prometheus_rules > deploy/prometheus/podembed.rules.yaml`
"""

from __future__ import annotations

import json

from podembed.tools.health.alarms import ALARMS
from podembed.tools.metrics.catalog import CATALOG

_HEAD = """\
# Alerts of Prometheus for the alarms of runs, as `podembed health` finds them. Name this file under `rule_files`.
# Made by: python -m podembed.tools.health.prometheus_rules > deploy/prometheus/podembed.rules.yaml"""


def text() -> str:
    """The file. Severity is `warning`, or `info` for what is only worth knowing."""
    lines = [_HEAD, "groups:", "  - name: podembed", "    rules:"]
    for alarm in ALARMS.values():
        summary = f"{alarm.name} in run {{{{ $labels.run }}}} {{{{ $labels.subject }}}}"
        lines += [
            f"      - alert: Podembed{''.join(word.capitalize() for word in alarm.name.split('_'))}",
            f'        expr: {CATALOG["alarm"].full_name}{{alarm="{alarm.name}"}} == 1',
            f"        labels: {{severity: {alarm.severity}}}",
            "        annotations:",
            # A string of JSON is one of YAML.
            f"          summary: {json.dumps(summary)}",
            f"          description: {json.dumps(f'Begins when: {alarm.begins}. {alarm.remedy}')}",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")
