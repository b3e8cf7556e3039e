"""What a user reads of events, for tests of the words."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.orchestrator.events.event import Emit, Event
from podembed.orchestrator.events.sentences import sentence


def saying(texts: list[str]) -> Emit:
    """Appends the sentence of each event."""
    return lambda event: texts.append(sentence(event))


def sentences(events: Sequence[Event]) -> list[str]:
    return [sentence(event) for event in events]
