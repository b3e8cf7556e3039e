"""What a user reads of events, for tests of the words."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.orchestrator.events.event import Emit, Event


def saying(texts: list[str]) -> Emit:
    """Appends the sentence of each event."""
    return lambda event: texts.append(event.sentence())


def sentences(events: Sequence[Event]) -> list[str]:
    return [event.sentence() for event in events]
