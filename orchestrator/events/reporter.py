"""`Reporter`, which shows a run to people, and `tell`, which takes an event to one."""

from __future__ import annotations

from typing import Protocol

from podembed.orchestrator.api.result import Evaluation, Recovery
from podembed.orchestrator.events.commits import Committed
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import Evaluated, WindowReport, WindowTrained
from podembed.orchestrator.events.run import Recovered
from podembed.workers.job.ranking import Baseline


class Reporter(Protocol):
    """Receives the facts of a run. Each event comes twice: as a value to `event`, and then to the method that shows it
    to people. Here they do nothing.
    """

    def event(self, event: Event) -> None:
        """What happened, as a value; for what acts on events or counts them."""

    def activity(self, what: str) -> None:
        """What is being done from now on, while no window is trained. The next activity, the next window and `close`
        end it.
        """

    def notice(self, text: str) -> None:
        """The sentence of an event that has no method here."""

    def window(self, report: WindowReport) -> None:
        """Steps were trained."""

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None:
        """A state was judged."""

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        """A state was committed."""

    def recovery(self, recovery: Recovery) -> None:
        """A fault is over."""

    def close(self) -> None:
        """Nothing is shown for now, such as while a generation ends."""


class SilentReporter(Reporter):
    """Shows nothing."""


def tell(reporter: Reporter, event: Event) -> None:
    """Takes an event to a reporter."""
    # A program's own reporter may be older than this method.
    if (take := getattr(reporter, "event", None)) is not None:
        take(event)
    match event:
        case WindowTrained(report=report):
            reporter.window(report)
        case Evaluated(evaluation=evaluation, best_auc=best_auc, baseline=baseline):
            reporter.evaluation(evaluation, best_auc=best_auc, baseline=baseline)
        case Committed(name=name, size_bytes=size_bytes, seconds=seconds):
            reporter.commit(name, size_bytes=size_bytes, seconds=seconds)
        case Recovered(recovery=recovery):
            reporter.recovery(recovery)
        case _:
            reporter.notice(event.sentence())


def print_sentence(event: Event) -> None:
    """Prints an event's sentence, for programs without a reporter."""
    print(event.sentence())
