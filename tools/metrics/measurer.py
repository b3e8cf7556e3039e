"""`Measurer`: makes points of a driver's events. Pure bookkeeping; it waits for nothing and writes nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from podembed.orchestrator.events.commits import CommitDelayed, Committed, SaveFailed
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan, AlarmEnded
from podembed.orchestrator.events.progress import (
    Evaluated,
    HostKeepsUp,
    HostMeasures,
    HostSlow,
    RowsPutAside,
    WindowTrained,
)
from podembed.orchestrator.events.run import GenerationLost, GenerationStarted, Recovered
from podembed.tools.metrics.data import DataSeries
from podembed.tools.metrics.point import Measurement, Point
from podembed.workers.host.row_norms import QUANTILES, TableNorms
from podembed.workers.liveness.progress import Phase

CAUSES = ("host", "preemption", "host_memory", "device_memory", "user")
"""To which a run that goes on may charge a fault, as `FaultClass` names them."""


class Measurer:
    """See the module. Mutated: totals of this driver, and the windows since the last commit.

    Args:
      monotonic_s: measures the driver's wall time.
      wall_s: dates points.
      severities: severities of the alarms that may begin, `warning` or `info`.
    """

    def __init__(
        self,
        *,
        monotonic_s: Callable[[], float],
        wall_s: Callable[[], float],
        severities: Mapping[str, str] | None = None,
    ) -> None:
        self._monotonic_s, self._wall_s = monotonic_s, wall_s
        self._began_s = monotonic_s()
        self._generation = self._step = 0
        self._has_begun = False
        # Step → seconds of the window that ended there. Those up to a commit are in one sum.
        self._windows: dict[int, float] = {}
        self._kept_s = 0.0
        self._samples = 0
        self._sent: Counter[str] = Counter()
        # Host and process → processor time that it had used before.
        self._cpu_s: dict[tuple[int, int], float] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)
        # As they were measured last in this generation.
        self._rates: dict[str, float] = {}
        self._lost_steps: Counter[str] = Counter()
        self._recoveries: Counter[str] = Counter()
        self._fault = "unknown"
        self._num_commits = self._num_failed_saves = 0
        self._delayed_s = 0.0
        self._data = DataSeries()
        self._severities = severities or {}
        self._slow_hosts: set[str] = set()

    def point(self, event: Event) -> Point | None:
        """What an event says in numbers; None if it has none."""
        match event:
            case WindowTrained():
                return self._window(event)
            case Evaluated(evaluation=evaluation, best_auc=best_auc, orders=orders):
                figures = [
                    Measurement("evaluation", value, {"metric": name}) for name, value in evaluation.values.items()
                ]
                figures.append(Measurement("evaluation_samples", evaluation.num_samples))
                figures += [] if best_auc is None else [Measurement("reachable_auc", best_auc)]
                figures += [
                    Measurement("evaluation_order", 1.0 if order == "max" else -1.0, {"metric": name})
                    for name, order in orders.items()
                    if name in evaluation.values
                ]
                return self._at(evaluation.step, figures)
            case AlarmBegan(alarm=alarm, subject=subject):
                return self._at(self._step, [self._alarm(alarm, subject, stands=True)])
            case AlarmEnded(alarm=alarm, subject=subject):
                return self._at(self._step, [self._alarm(alarm, subject, stands=False)])
            case HostSlow(host=host):
                self._slow_hosts.add(f"host {host}")
                return self._at(self._step, [self._alarm("slow_host", f"host {host}", stands=True)])
            case HostKeepsUp(host=host):
                self._slow_hosts.discard(f"host {host}")
                return self._at(self._step, [self._alarm("slow_host", f"host {host}", stands=False)])
            case Committed(step=step, size_bytes=size_bytes, seconds=seconds):
                self._fold(step)
                self._num_commits += 1
                return self._at(
                    step,
                    [
                        Measurement("commits", self._num_commits),
                        Measurement("committed_step", step),
                        Measurement("commit_bytes", size_bytes),
                        Measurement("commit_seconds", seconds),
                    ],
                )
            case CommitDelayed(waited_s=waited_s):
                self._delayed_s += waited_s
                return self._at(self._step, [Measurement("commit_delay_seconds", self._delayed_s)])
            case SaveFailed():
                self._num_failed_saves += 1
                return self._at(self._step, [Measurement("failed_saves", self._num_failed_saves)])
            case RowsPutAside(num_rows=num_rows):
                return self._at(self._step, [Measurement("malformed_rows", num_rows)])
            case GenerationStarted(generation=generation, base_step=base_step):
                # A driver that goes on with a run says so before anything is counted.
                self._generation, self._step = generation, base_step
                self._rates = {}
                return self._begun()
            case GenerationLost(fault=fault):
                self._fault = fault
                return None
            case Recovered():
                return self._recovered(event)
            case _:
                return None

    def _begun(self) -> Point | None:
        """Zeros of what faults and commits count, once: an increase is seen from a value before it."""
        if self._has_begun:
            return None
        self._has_begun = True
        by_cause = [Measurement(name, 0, {"cause": cause}) for name in ("lost_steps", "recoveries") for cause in CAUSES]
        counted = [Measurement(name, 0) for name in ("commits", "failed_saves", "commit_delay_seconds")]
        alarms = [self._alarm(name, "", stands=False) for name in self._severities]
        return self._at(self._step, [*counted, *by_cause, *alarms])

    def _alarm(self, name: str, subject: str, *, stands: bool) -> Measurement:
        severity = self._severities.get(name, "warning")
        return Measurement("alarm", float(stands), {"alarm": name, "severity": severity, "subject": subject})

    def _recovered(self, event: Recovered) -> Point:
        cause, recovery = self._fault, event.recovery
        self._lost_steps[cause] += recovery.discarded_steps
        self._recoveries[cause] += 1
        self._generation = recovery.generation
        self._rates = {}
        slow, self._slow_hosts = self._slow_hosts, set()
        self._cut(recovery.base_step)
        return self._at(
            recovery.base_step,
            [
                Measurement("lost_steps", self._lost_steps[cause], {"cause": cause}),
                Measurement("recoveries", self._recoveries[cause], {"cause": cause}),
                Measurement("recovery_seconds", recovery.total_s),
                # Who is slow is found anew among the new processes.
                *(self._alarm("slow_host", host, stands=False) for host in sorted(slow)),
            ],
        )

    def _window(self, event: WindowTrained) -> Point:
        report = event.report
        self._cut(event.first_step)
        self._generation = report.generation
        self._windows[report.step] = event.seconds
        self._samples += event.num_samples
        spent_s = self._monotonic_s() - self._began_s
        useful_s = self._kept_s + sum(self._windows.values())
        measurements = [
            Measurement("step", report.step),
            Measurement("steps_planned", report.total_steps),
            *([] if report.left_s is None else [Measurement("left_seconds", report.left_s)]),
            Measurement("generation", report.generation),
            Measurement("hosts", report.num_hosts),
            Measurement("loss", report.loss),
            Measurement("samples", self._samples),
            Measurement("samples_per_second", report.samples_per_s),
            Measurement("step_seconds", event.seconds / max(1, report.step - event.first_step)),
            Measurement("goodput_ratio", min(1.0, useful_s / spent_s) if spent_s > 0 else 0.0),
            Measurement("slowest_host_ratio", report.slowest),
            Measurement("owner_imbalance_ratio", report.imbalance),
            *learning(event),
            *self._learning_rates(event),
            *_tables(event.tables),
            *self._processor_time(event),
        ]
        if event.rounds:
            num_steps = max(1, report.step - event.first_step)
            measurements.append(Measurement("exchange_rounds", event.rounds / num_steps))
        for host in event.hosts:
            measurements += self._host(host, event)
        measurements += [*_rows(event), *_vocabularies(event)]
        measurements += self._data.take([host.data for host in event.hosts if host.data is not None])
        return self._at(report.step, measurements, first_step=event.first_step)

    def _host(self, host: HostMeasures, event: WindowTrained) -> Iterator[Measurement]:
        by_host, num_steps = {"host": str(host.host)}, max(1, event.report.step - event.first_step)
        for phase, seconds in host.phase_s.items():
            yield Measurement("phase_seconds", seconds / num_steps, by_host | {"phase": phase.value})
        for source, seconds in _waited(host).items():
            share = min(1.0, seconds / event.seconds) if event.seconds > 0 else 0.0
            yield Measurement("waited_ratio", share, by_host | {"source": source})
        self._sent[str(host.host)] += host.bytes_sent
        yield Measurement("sent_bytes", self._sent[str(host.host)], by_host)
        yield Measurement("memory_bytes", sum(usage.memory_bytes for usage in host.usage), by_host)
        yield Measurement("peak_memory_bytes", sum(usage.peak_memory_bytes for usage in host.usage), by_host)
        yield Measurement("open_files", sum(usage.num_files for usage in host.usage), by_host)
        yield Measurement("open_sockets", sum(usage.num_sockets for usage in host.usage), by_host)

    def _learning_rates(self, event: WindowTrained) -> list[Measurement]:
        changed = rates_changed(self._rates, event)
        self._rates |= changed
        return [Measurement("learning_rate", rate, {"table": table}) for table, rate in changed.items()]

    def _processor_time(self, event: WindowTrained) -> list[Measurement]:
        """Processor time of each host, and samples per second of all of it, where all processes existed a window
        ago.
        """
        spent_s, are_known, found = 0.0, bool(event.hosts), []
        for host in event.hosts:
            for usage in host.usage:
                key = (host.host, usage.process)
                are_known &= key in self._cpu_s
                # Of a new process all counts: it began after the window before.
                since_s = usage.cpu_s - self._cpu_s.get(key, 0.0)
                spent_s += since_s
                self._spent[str(host.host)] += since_s
            found.append(Measurement("cpu_seconds", self._spent[str(host.host)], {"host": str(host.host)}))
        self._cpu_s = {(host.host, usage.process): usage.cpu_s for host in event.hosts for usage in host.usage}
        if are_known and spent_s > 0:
            found.append(Measurement("samples_per_cpu_second", event.num_samples / spent_s))
        return found

    def _at(self, step: int, measurements: list[Measurement], *, first_step: int | None = None) -> Point:
        self._step = step
        return Point(
            generation=self._generation,
            first_step=step if first_step is None else first_step,
            step=step,
            unix_s=self._wall_s(),
            measurements=tuple(measurements),
        )

    def _cut(self, step: int) -> None:
        """Windows after a step do not count any more."""
        self._windows = {at: seconds for at, seconds in self._windows.items() if at <= step}

    def _fold(self, step: int) -> None:
        """Windows up to a commit stay for good."""
        self._kept_s += sum(seconds for at, seconds in self._windows.items() if at <= step)
        self._windows = {at: seconds for at, seconds in self._windows.items() if at > step}


def _rows(event: WindowTrained) -> list[Measurement]:
    num_steps = max(1, event.report.step - event.first_step)
    totals: Counter[str] = Counter()
    for host in event.hosts:
        totals.update(host.rows_asked)
    return [Measurement("requested_rows", rows / num_steps, {"table": table}) for table, rows in totals.items()]


def _vocabularies(event: WindowTrained) -> Iterator[Measurement]:
    num_steps = max(1, event.report.step - event.first_step)
    for table in sorted({name for host in event.hosts for name in host.vocabularies}):
        counts = [host.vocabularies[table] for host in event.hosts if table in host.vocabularies]
        by_table = {"table": table}
        num_keys = sum(one.num_keys for one in counts)
        yield Measurement("vocabulary_keys", num_keys, by_table)
        yield Measurement("vocabulary_fill_ratio", num_keys / max(1, sum(one.num_rows for one in counts)), by_table)
        for name in ("admitted", "evicted", "refused", "dropped", "returned"):
            yield Measurement(f"vocabulary_{name}", sum(getattr(one, name) for one in counts) / num_steps, by_table)


def _tables(tables: Sequence[TableNorms]) -> Iterator[Measurement]:
    for found in tables:
        by_table = {"table": found.table}
        if found.num_rows and found.num_trained is not None:
            yield Measurement("table_trained_ratio", found.num_trained / found.num_rows, by_table)
        for name, values in (("table_row_norm", found.norms), ("table_row_growth", found.growth)):
            # Where no row has a value, none of the quantiles has.
            for quantile, value in zip(QUANTILES, values, strict=False):
                yield Measurement(name, value, {**by_table, "quantile": f"{quantile:g}"})


def _waited(host: HostMeasures) -> dict[str, float]:
    """Seconds that a host waited, by what for."""
    waited = {"input": 0.0, "device": 0.0, "hosts": 0.0, "storage": 0.0}
    for phase, seconds in host.phase_s.items():
        if phase is Phase.READ:
            waited["input"] += seconds
        elif phase.waits_for_device:
            waited["device"] += seconds
        elif phase.waits_for_hosts:
            waited["hosts"] += seconds
        elif phase.depends_on_storage:
            waited["storage"] += seconds
    return waited


MOST_RATES = 64
"""Tables whose learning rates are kept, in the job's order."""


def learning(event: WindowTrained) -> Iterator[Measurement]:
    """All but learning rates."""
    for found in event.figures:
        by_task = {"task": found.label}
        yield Measurement("window_auc", found.auc, by_task)
        yield Measurement("window_auc_error", found.auc_error, by_task)
        yield Measurement("window_normalized_entropy", found.normalized_entropy, by_task)
        yield Measurement("window_calibration", found.calibration, by_task)
        yield Measurement("window_positives", found.positives, by_task)
    norms = event.norms
    if norms is None or max(norms.largest_gradient, norms.params or 0.0) <= 0:
        # A model without dense parameters has no norms.
        return
    yield Measurement("dense_gradient_norm", norms.gradient)
    yield Measurement("dense_largest_gradient_norm", norms.largest_gradient)
    if norms.update is not None and norms.params is not None:
        yield Measurement("dense_update_norm", norms.update)
        yield Measurement("dense_parameter_norm", norms.params)


def rates_changed(before: Mapping[str, float], event: WindowTrained) -> dict[str, float]:
    """Learning rates that are not as they were measured last."""
    kept = list(event.rates.items())[:MOST_RATES]
    return {table: rate for table, rate in kept if before.get(table) != rate}
