"""Which reporter a command has."""

from __future__ import annotations

from typing import Literal

from podembed.orchestrator.events.reporter import Reporter
from podembed.orchestrator.reporters.console import ConsoleReporter
from podembed.orchestrator.reporters.json_log import JsonReporter


def reporter_for(log: Literal["text", "json"]) -> Reporter:
    """As `--log` wants it."""
    return JsonReporter() if log == "json" else ConsoleReporter()
