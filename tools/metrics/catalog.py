"""`CATALOG`: every series that a run measures, with its kind, unit, labels and meaning.

Names follow OpenMetrics: base units, the unit last, and `_total` behind counters. docs/observability.md has the same
table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

PREFIX = "podembed_"
_LATELY = "as of five processor seconds ago at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSeries:
    """One series, or one for each value of its labels.

    Attributes:
      name: without the prefix.
      kind: a `counter` only grows within a driver; a `gauge` is what was seen last.
      unit: `seconds`, `bytes`, `ratio`, `samples` and so on; empty for a plain number.
      meaning: a sentence.
      labels: names of labels.
      is_kept: a window names it only where it changed or was measured, so what was seen before stands.
    """

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    is_kept: bool = False

    @property
    def full_name(self) -> str:
        """The name with the prefix, and `_total` for a counter."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _gauge(name: str, unit: str, meaning: str, *labels: str) -> MetricSeries:
    return MetricSeries(name=name, kind="gauge", unit=unit, meaning=meaning, labels=labels)


def _counter(name: str, unit: str, meaning: str, *labels: str) -> MetricSeries:
    return MetricSeries(name=name, kind="counter", unit=unit, meaning=meaning, labels=labels)


CATALOG: dict[str, MetricSeries] = {
    metric.name: metric
    for metric in (
        # Where the run stands.
        _gauge("step", "steps", "Steps that are done."),
        _gauge("steps_planned", "steps", "Steps of the whole run."),
        _gauge("left_seconds", "seconds", "Time to the end of the run at the pace of the last windows."),
        _gauge("generation", "", "Number of the generation that trains."),
        _gauge("hosts", "hosts", "Hosts that train."),
        # Learning.
        _gauge("loss", "", "Mean loss of the window's steps, each before its update."),
        _gauge("evaluation", "", "A figure of the last evaluation.", "metric"),
        _gauge("evaluation_samples", "samples", "Samples of the last evaluation."),
        _gauge("evaluation_order", "", "1 where the job says that the highest is best, -1 for the lowest.", "metric"),
        _gauge("reachable_auc", "", "The best AUC that any model can reach on them, where the job knows it."),
        _gauge("window_auc", "", "AUC of the window's samples, each scored before it is trained on.", "task"),
        _gauge("window_auc_error", "", "The exact AUC is at most so far from `window_auc`.", "task"),
        _gauge(
            "window_normalized_entropy",
            "",
            "Log loss of the same scores over that of the window's share of positives.",
            "task",
        ),
        _gauge("window_calibration", "", "Positives that the same scores predict over those that came.", "task"),
        _gauge("window_positives", "samples", "Positives of the window, by their weight.", "task"),
        replace(_gauge("learning_rate", "", "Learning rate of a table, where it changed.", "table"), is_kept=True),
        _gauge("dense_gradient_norm", "", "Euclidean norm of all dense gradients, mean of the window."),
        _gauge("dense_largest_gradient_norm", "", "The largest of one step in the window."),
        replace(
            _gauge(
                "dense_update_norm",
                "",
                "Euclidean norm of the change of all dense parameters by a step, mean of every 32nd of the window.",
            ),
            is_kept=True,
        ),
        replace(
            _gauge(
                "dense_parameter_norm", "", "Euclidean norm of all dense parameters before the last of these steps."
            ),
            is_kept=True,
        ),
        # Speed.
        _counter("samples", "samples", "Samples trained by this driver, also those of steps that a fault took back."),
        _gauge("samples_per_second", "", "Samples over the window's wall time."),
        _gauge("samples_per_cpu_second", "", "Samples over the processor time of all worker processes in the window."),
        _gauge("step_seconds", "seconds", "Wall time of a step, mean of the window."),
        _gauge("phase_seconds", "seconds", "Time of a phase a step, mean of the window.", "host", "phase"),
        _gauge(
            "waited_ratio",
            "ratio",
            "Share of the window in which a host waited for its input, its device, other hosts or the storage.",
            "host",
            "source",
        ),
        _counter("cpu_seconds", "seconds", "Processor time of a host's processes.", "host"),
        _counter("sent_bytes", "bytes", "Bytes that a host sent to other hosts.", "host"),
        _gauge("goodput_ratio", "ratio", "Time of the windows that count over the driver's wall time."),
        _counter("lost_steps", "steps", "Steps that a fault took back, by what it was charged to.", "cause"),
        _counter("recoveries", "", "Faults that were recovered from, by what they were charged to.", "cause"),
        _gauge("recovery_seconds", "seconds", "Length of the last recovery."),
        _gauge("slowest_host_ratio", "ratio", "Work time of the slowest host over that of the others."),
        _gauge("owner_imbalance_ratio", "ratio", "Rows requested of the busiest owner over the mean of all."),
        # Tables.
        _gauge(
            "table_trained_ratio", "ratio", "Share of a sample of the table's rows that were ever updated.", "table"
        ),
        _gauge("table_row_norm", "", "Quantile of the Euclidean norms of such rows.", "table", "quantile"),
        _gauge(
            "table_row_growth",
            "",
            "Quantile of such a norm over that of the row's first values; these count as 0.2 a number at least.",
            "table",
            "quantile",
        ),
        _gauge("requested_rows", "rows", "Rows a step that hosts requested of other tables than whole ones.", "table"),
        _gauge(
            "exchange_rounds", "rounds", "Rounds a step in which devices ask each other for rows of sharded tables."
        ),
        _gauge("vocabulary_keys", "keys", "Keys that have a row, of a table whose keys come and go.", "table"),
        _gauge("vocabulary_fill_ratio", "ratio", "The same over the rows that keys may have.", "table"),
        _gauge("vocabulary_admitted", "keys", "Keys that got a row, a step.", "table"),
        _gauge("vocabulary_evicted", "keys", "Keys that lost their row, a step.", "table"),
        _gauge("vocabulary_refused", "keys", "Keys that asked for a row and found none free, a step.", "table"),
        _gauge("vocabulary_dropped", "keys", "Keys without a row whose gradient was dropped, a step.", "table"),
        _gauge("vocabulary_returned", "keys", "Of those that got a row, keys that had lost one, a step.", "table"),
        # Commits.
        _counter("commits", "", "Commits that were acknowledged."),
        _gauge("committed_step", "steps", "Step of the newest commit."),
        _gauge("commit_bytes", "bytes", "Bytes that the newest commit wrote."),
        _gauge("commit_seconds", "seconds", "Time from the newest commit's step to its acknowledgement."),
        _counter("commit_delay_seconds", "seconds", "Time that training waited to begin a commit."),
        _counter("failed_saves", "", "Saves that did not become commits."),
        # Data.
        _gauge("malformed_rows", "rows", "Malformed rows that were left out, in the whole run."),
        _gauge(
            "data_reference_samples",
            "samples",
            "Samples of the first part of the driver's time, with which later ones are compared.",
        ),
        _gauge("feature_empty_ratio", "ratio", "Share of the samples without an id of a feature.", "feature"),
        _gauge(
            "feature_top_ratio",
            "ratio",
            "Share of the most frequent id or number of an input, among samples that have one.",
            "feature",
        ),
        _gauge(
            "feature_top_ten_ratio",
            "ratio",
            "Share of the ten most frequent ids of a feature, among such samples.",
            "feature",
        ),
        _gauge(
            "feature_distance_ratio",
            "ratio",
            "Share of an input's samples that differ from those of the reference, beyond chance.",
            "feature",
        ),
        _gauge(
            "feature_spread_ratio",
            "ratio",
            "The same between samples from different places in the data.",
            "feature",
        ),
        _gauge(
            "feature_other_distance_ratio",
            "ratio",
            "The same as the distance, to the reference of another input, where that is much nearer.",
            "feature",
            "other",
        ),
        # Health.
        replace(
            _gauge(
                "alarm",
                "",
                "1 while an alarm stands, and 0 after it. Severity is `warning`, or `info` for a note.",
                "alarm",
                "severity",
                "subject",
            ),
            is_kept=True,
        ),
        # Machines.
        _gauge("memory_bytes", "bytes", "Memory of a host's processes.", "host"),
        _gauge("peak_memory_bytes", "bytes", "Most memory that a host's processes have had.", "host"),
        _gauge("open_files", "files", f"Open files and sockets of a host's processes, {_LATELY}.", "host"),
        _gauge("open_sockets", "sockets", f"Sockets of a host's processes, {_LATELY}.", "host"),
    )
}
