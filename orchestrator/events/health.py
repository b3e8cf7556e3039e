"""Events of a run's health: what detectors find in its measurements."""

from __future__ import annotations

from dataclasses import dataclass

from podembed.orchestrator.events.event import Event, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmBegan(Event):
    """Measurements show that something is wrong.

    Attributes:
      alarm: its name in the table of docs/observability.md.
      subject: what it is about, such as `host 1`; empty for the run as a whole.
      step: after which it was seen.
      is_note: it is worth knowing, and nothing is wrong.
      finding: what was found, with numbers, for people.
      remedy: what to do, for people.
    """

    alarm: str
    subject: str
    step: int
    is_note: bool
    finding: str
    remedy: str

    @property
    def level(self) -> Level:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The level: for a note that of progress."""
        return Level.INFO if self.is_note else Level.WARNING

    def sentence(self) -> str:
        return f"{'NOTE' if self.is_note else 'ALARM'} {self.alarm} at step {self.step}: {self.finding}. {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmEnded(Event):
    """What an alarm was about is over."""

    alarm: str
    subject: str
    step: int

    def sentence(self) -> str:
        subject = f" of {self.subject}" if self.subject else ""
        return f"alarm {self.alarm}{subject} is over at step {self.step}"
