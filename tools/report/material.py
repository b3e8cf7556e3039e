"""`Material`: all that a report says of one run, read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.save_policies import Order, is_better, order_of
from podembed.orchestrator.commit.holder import HEARTBEAT_FRESH_S
from podembed.orchestrator.run.input_record import InputRecord, read_input
from podembed.orchestrator.run.policy_record import PolicyRecord, read_policies
from podembed.orchestrator.run.reference import open_run_store
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.check import replayed
from podembed.tools.inspect.inspect_run import RunDescription, describe
from podembed.tools.metrics.point import Measurement, StreamLine
from podembed.tools.metrics.reading import RunStream, StreamReader
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A run at one moment.

    Attributes:
      name: text that tells it from the other runs of the report.
      files: of its data, as it began; None if that is not known.
      trouble: why some of its measurements could not be read; empty if none was.
      policies: what it keeps, which says which evaluation is the best; None if that is not known.
      alarms: alarms that stand, as `podembed health` finds them, with the steps at which they began; notes last.
    """

    name: str
    description: RunDescription
    stream: RunStream
    files: InputRecord | None
    trouble: str
    alarms: tuple[tuple[StandingAlarm, int], ...] = ()
    policies: PolicyRecord | None = None

    @property
    def is_driven(self) -> bool:
        """Whether a driver was alive a moment ago."""
        beat = self.description.heartbeat
        return beat is not None and self.description.described_unix_s - beat.written_unix_s <= HEARTBEAT_FRESH_S

    @property
    def num_measured(self) -> int:
        return len(self.stream.points) + len(self.stream.lost)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that wrote the newest commit."""
        head = self.description.head
        return dict(head.manifest.versions) if head and head.manifest else {}

    def events(self, *kinds: str) -> list[StreamLine]:
        return [line for line in self.stream.events if line.kind in kinds]

    def last(self, name: str, **labels: str) -> float | None:
        """The newest value of a series; None where there is none."""
        series = self.stream.series(name, **labels)
        return series[-1][1] if series else None

    def best(self, metric: str, line: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
        """The best of some evaluations, the first of equals. None for a metric of the job's own, of which the run does
        not know which end is the best.
        """
        kept_by = self.policies if self.policies is not None and self.policies.metric == metric else None
        sign = self.last("evaluation_order", metric=metric)
        declared: dict[str, Order] = {} if sign is None else {metric: "max" if sign > 0 else "min"}
        order = (kept_by.config.metric_order if kept_by is not None else None) or order_of(metric, declared)
        if order is None and kept_by is None:
            return None
        best = line[0]
        for made in line[1:]:
            best = made if is_better(metric, made[1], best[1], order=order) else best
        return best

    def measurements(self) -> Iterator[tuple[int, Measurement]]:
        """Step and measurement of all points that count."""
        for point in self.stream.points:
            for measurement in point.measurements:
                yield point.step, measurement

    def notes(self) -> list[str]:
        """What a reader must know before the figures."""
        found = []
        if self.is_driven:
            found.append("This run is being written. The report shows it as it was a moment ago.")
        if self.trouble:
            found.append(f"Measurements could not be read: {self.trouble}")
        elif not self.num_measured:
            found.append(
                "This run has no measurements: they were switched off, or an older version wrote it. "
                "Curves come from its history, and faults are not known."
            )
        if self.stream.num_unread:
            found.append(f"{self.stream.num_unread:,} lines of measurements are damaged and left out.")
        if self.stream.lost:
            found.append(f"{len(self.stream.lost):,} points of steps that faults took back are left out.")
        found += [f"{name} is damaged. podembed fsck says what follows." for name in self.description.damaged]
        return found


def read_material(run: str, *, name: str, now_unix_s: float) -> Material:
    """Reads a run.

    Raises:
      ConfigurationError: there is none; StorageError: its storage does not answer, or its record is damaged.
    """
    store = open_run_store(run)
    trouble = ""
    try:
        stream = StreamReader(store).read()
    except StorageError as error:
        stream, trouble = RunStream(points=(), lost=(), events=(), num_drivers=0), str(error)
    health, _ = replayed(stream.points)
    standing = [(one, health.began_step[key]) for key, one in health.standing.items()]
    return Material(
        name=name,
        description=describe(store, now_unix_s=now_unix_s),
        stream=stream,
        files=read_input(store).began,
        trouble=trouble,
        alarms=tuple(sorted(standing, key=lambda one: one[0].kind.is_note)),
        policies=_policies(store),
    )


def _policies(store: Store) -> PolicyRecord | None:
    try:
        return read_policies(store)
    except StorageError:
        return None


def distinct_names(runs: list[str]) -> list[str]:
    """Last parts of the runs' locations, as much as tells them apart."""
    parts = [run.rstrip("/").split("/") for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(runs)):
            break
    else:
        names = runs
    return names if len(set(names)) == len(names) else [f"{name} ({at})" for at, name in enumerate(names, 1)]
