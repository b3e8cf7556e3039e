"""The parts of a report that tell of one run: what it is, its time, its faults, commits, tables, data and commands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from podembed.orchestrator.api.text import format_bytes, format_duration, plural
from podembed.orchestrator.commit.checkpoint import CommitInfo
from podembed.orchestrator.commit.run_record import SHUFFLED
from podembed.orchestrator.run.history import median_samples_per_s
from podembed.tools.metrics.point import Measurement, StreamLine
from podembed.tools.metrics.reading import FAULTS
from podembed.tools.report.commands import commands_of
from podembed.tools.report.curves import evaluations_of, within, worded
from podembed.tools.report.markup import Html, command, element, figure, folded, join, pairs, table
from podembed.tools.report.material import Material
from podembed.tools.report.times import date, date_and_time

MOST_ROWS = 200
"""Most rows of a table. The report says how many it leaves out."""
# Of the time when something was wrong, its end counts, too.
_TROUBLES = (*FAULTS, "commit_unsettled", "alarm_ended")
# Of which the report says enough elsewhere.
_ORDINARY = {"commit", "evaluation", "tables_measured", "metrics_served", "begin", "end"}


def facts(material: Material) -> list[tuple[str, object]]:
    """What was trained on what, in a few words each."""
    record, head = material.description.record, material.description.head
    found: list[tuple[str, object]] = [("Where", material.description.location)]
    if record is not None:
        found += [
            (
                "Job",
                record.job_function or "imported tables" if record.is_imported else record.job_function or "a value",
            ),
            ("Arguments", record.job_arguments or "none"),
            ("Begun", date_and_time(record.created_unix_s)),
            ("Samples of an epoch", f"{record.num_samples:,}"),
            ("Batch", f"{record.batch_size:,} samples, {record.steps_per_epoch:,} steps an epoch"),
            ("Seed and order", f"{record.seed}, {'shuffled' if record.order == SHUFFLED else 'in order of the files'}"),
            ("Staleness and wire", f"{record.staleness}, {record.wire_dtype}"),
            ("Tables", _tables_in_words(material)),
        ]
        if record.warm_start is not None:
            found.append(("Began from", f"{record.warm_start.commit} in {record.warm_start.location}"))
    found += [
        ("Steps", _steps(material)),
        ("Hosts", _hosts(material)),
        ("Newest commit", f"{head.name}" if head else "none yet"),
    ]
    return found


def outcome(material: Material) -> list[tuple[str, str]]:
    """The figures at the end, and the best evaluations, to be compared with those of other runs."""
    description = material.description
    found = [("Step", _steps(material)), ("Hosts", _hosts(material))]
    history = description.history
    loss = material.last("loss")
    if loss is None and history and history.windows:
        loss = history.windows[-1].loss
    found.append(("Last loss", figure(loss)))
    for name, line in evaluations_of(material).items():
        found.append((f"Last {within(name)}", _quality(line[-1][1])))
        best = material.best(name, line)
        found += [] if best is None else [(f"Best {within(name)}", f"{_quality(best[1])} at step {best[0]:,}")]
        reachable = material.last("reachable_auc") if name == "auc" else None
        found += [] if reachable is None else [("Best reachable AUC", _quality(reachable))]
    rate = material.stream.median_samples_per_s
    if rate is None and history and history.windows:
        rate = median_samples_per_s(history.windows)
    found.append(("Median samples/s", "–" if rate is None else f"{rate:,.0f}"))
    left_s = (
        material.stream.windows[-1].value("left_seconds") if material.is_driven and material.stream.windows else None
    )
    found += [] if left_s is None else [("Time left", format_duration(left_s))]
    alarms = [one.alarm for one, _ in material.alarms if not one.kind.is_note]
    found.append(("Alarms", ", ".join(dict.fromkeys(alarms)) or ("none" if material.num_measured else "–")))
    goodput = material.last("goodput_ratio")
    found.append(("Goodput of the last driver", "–" if goodput is None else f"{goodput:.0%}"))
    recoveries = material.events("recovery")
    lost = sum(int(line.values.get("discarded_steps") or 0) for line in recoveries)
    measured = material.num_measured > 0
    told = f"{len(recoveries):,}, {plural(lost, 'step')} lost" if recoveries else "none"
    found.append(("Recoveries", told if measured else "–"))
    commits = [commit for commit in description.commits if commit.counts]
    size = format_bytes(commits[0].manifest.size_bytes) if commits and commits[0].manifest else "–"
    found += [("Commits kept", f"{len(commits):,}"), ("Size of the newest", size)]
    return found


def _quality(value: float) -> str:
    """As the summary of a run has it."""
    return f"{value:.4f}" if abs(value) < 1000 else figure(value)


def _steps(material: Material) -> str:
    windows, head = material.stream.windows, material.description.head
    step = windows[-1].step if windows else head.step if head else 0
    planned = material.last("steps_planned")
    return f"{step:,} of {planned:,.0f}" if planned else f"{step:,}"


def _hosts(material: Material) -> str:
    seen = sorted({int(value) for _, value in material.stream.series("hosts")})
    if not seen:
        head = material.description.head
        return f"{head.manifest.hosts}" if head and head.manifest else "–"
    return f"{seen[0]}" if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"


def _tables_in_words(material: Material) -> str:
    tables = material.description.tables
    return f"{plural(len(tables), 'table')}, {sum(table.num_rows for table in tables):,} rows"


def phase_times(material: Material) -> dict[str, dict[str, float]]:
    """Seconds of each phase in all windows that count, by host.

    Where a stream was thinned, a window stands for the steps before it as well.
    """
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    ended = None
    for point in material.stream.windows:
        num_steps = point.step - (point.first_step if ended is None else min(ended, point.first_step))
        ended = point.step
        for one in point.each("phase_seconds"):
            host, phase = one.labels.get("host", "?"), one.labels.get("phase", "?")
            if one.value > 0:
                found[host][phase] += one.value * num_steps
    return {host: dict(phases) for host, phases in sorted(found.items(), key=lambda item: _number_of(item[0]))}


def _number_of(host: str) -> tuple[int, str]:
    return (int(host), "") if host.isdecimal() else (1 << 30, host)


def waited_table(material: Material) -> Html:
    """What each host waited for, as the mean of the windows that it was in, by their seconds."""
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    totals: defaultdict[str, float] = defaultdict(float)
    for point in material.stream.windows:
        seconds = (point.value("step_seconds") or 0.0) * (point.step - point.first_step)
        for host in point.by_label("waited_ratio", "host"):
            totals[host] += seconds
        for one in point.each("waited_ratio"):
            sums[one.labels.get("host", "?")][one.labels.get("source", "?")] += one.value * seconds
    sources = sorted({source for counts in sums.values() for source in counts})
    rows = [
        (f"host {host}", *(f"{counts[source] / (totals[host] or 1.0):.1%}" for source in sources))
        for host, counts in sorted(sums.items(), key=lambda item: _number_of(item[0]))
    ]
    return table("Share of the time that a host waited, by what for", ["host", *sources], rows)


def alarms_table(material: Material) -> Html:
    """Alarms that stand at the end, with what to do."""
    if not material.alarms:
        return element("p", "No alarm stands." if material.num_measured else "Without measurements, it is not known.")
    rows = [
        (
            f"{'note ' if one.kind.is_note else ''}{one.alarm}",
            f"{began:,}",
            f"{one.text[:1].upper()}{one.text[1:]}.",
            one.kind.remedy,
        )
        for one, began in material.alarms
    ]
    return table("Alarms", ["alarm", "since step", "what was found", "what to do"], rows, numbers=False)


def faults_table(material: Material) -> Html:
    """Faults, recoveries and other changes, in the order in which they happened."""
    found = [line for line in material.stream.events if line.kind in _TROUBLES]
    if not found:
        words = "No fault is known." if material.num_measured else "Without measurements, faults are not known."
        return element("p", words)
    rows = [(date_and_time(line.unix_s), worded(line.kind), line.text) for line in found[-MOST_ROWS:]]
    return join(
        [left_out(len(found)), table("Faults and recoveries", ["when", "what", "in words"], rows, numbers=False)]
    )


def events_table(material: Material) -> Html:
    """All other events, folded."""
    found = [line for line in material.stream.events if line.kind not in _ORDINARY and line.kind not in _TROUBLES]
    if not found:
        return Html("")
    rows = [(date_and_time(line.unix_s), worded(line.kind), line.text[:500]) for line in found[-MOST_ROWS:]]
    return folded(
        f"Other events ({len(found):,})",
        left_out(len(found)),
        table("Other events", ["when", "what", "in words"], rows, numbers=False),
    )


def left_out(count: int) -> Html:
    if count <= MOST_ROWS:
        return Html("")
    return element("p", f"The newest {MOST_ROWS:,} of {count:,} are shown.", class_="note")


def commits_table(material: Material) -> Html:
    """Size and time of each commit, and how long training waited to begin it."""
    made: dict[str, StreamLine] = {str(line.values.get("name")): line for line in material.events("commit")}
    stalls: defaultdict[int, float] = defaultdict(float)
    for line in material.events("commit_delayed"):
        stalls[int(line.values.get("step") or 0)] += float(line.values.get("waited_s") or 0.0)
    kept = {commit.name: commit for commit in material.description.commits if commit.counts}
    names = sorted({*made, *kept}, reverse=True)
    if not names:
        return element("p", "No commit yet.")
    rows = [_commit_row(name, made.get(name), kept.get(name), stalls) for name in names[:MOST_ROWS]]
    failed = material.events("save_failed")
    return join(
        [
            left_out(len(names)),
            table("Commits, newest first", ["commit", "step", "when", "written", "took", "stall", "kept"], rows),
            element("p", f"{plural(len(failed), 'save')} failed; see the faults.") if failed else "",
        ]
    )


def _commit_row(
    name: str, line: StreamLine | None, info: CommitInfo | None, stalls: dict[int, float]
) -> Sequence[object]:
    manifest = info.manifest if info else None
    step = info.step if info else int(line.values.get("step") or 0) if line else 0
    when = line.unix_s if line else manifest.created_unix_s if manifest else None
    written = line.values.get("size_bytes") if line else manifest.written_bytes if manifest else None
    took = line.values.get("seconds") if line else None
    stall = f"{stalls[step]:.1f} s" if step in stalls else "none" if line else "–"
    state = "no" if info is None else "damaged" if info.problem else "newest" if info.is_head else "yes"
    return (
        name,
        f"{step:,}",
        "–" if when is None else date_and_time(when),
        "–" if written is None else format_bytes(written),
        "–" if took is None else f"{took:.1f} s",
        stall,
        state,
    )


def tables_table(material: Material) -> Html:
    """Each table: its shape and bytes, what samples request of it, and the newest value of every series of tables."""
    head = material.description.head
    sizes = {one.name: one.size_bytes for one in head.manifest.tables} if head and head.manifest else {}
    measured = {
        str(one.get("name")): one
        for line in material.events("tables_measured")
        for one in line.values.get("tables") or ()
        if isinstance(one, dict)
    }
    newest: dict[str, dict[str, float]] = {}
    for _, one in material.measurements():
        name = _column(one)
        if name:
            newest.setdefault(name, {})[one.labels["table"]] = one.value
    rows = []
    for declared in material.description.tables:
        seen = measured.get(declared.name, {})
        rows.append(
            (
                declared.name,
                f"{declared.num_rows:,}",
                declared.dim,
                declared.slots_in_words,
                format_bytes(sizes[declared.name]) if declared.name in sizes else "–",
                figure(seen.get("ids_per_sample")),
                _percent(seen.get("distinct_share")),
                _percent(seen.get("hot_share")),
                *(figure(values.get(declared.name)) for values in newest.values()),
            )
        )
    head_row = ["table", "rows", "dim", "slots", "bytes", "ids a sample", "distinct", "hottest 256 rows"]
    notes = ["Ids, distinct ids and the share of the hottest rows are those of a first step."] if measured else []
    if "median_row_norm" in newest:
        notes.append(
            "Row norms, their growth since the first values, and the share of rows that were ever trained are those of "
            "samples of rows, when hosts looked last."
        )
    return join(
        [table("Tables", [*head_row, *map(within, newest)], rows), element("p", " ".join(notes), class_="note")]
    )


def _column(one: Measurement) -> str:
    """What a series of tables is called in their table; empty for other series. Of quantiles the median has one."""
    name = one.name.removeprefix("table_")
    if set(one.labels) == {"table"}:
        return name
    is_median = set(one.labels) == {"table", "quantile"} and one.labels["quantile"] == "0.5"
    return f"median_{name}" if is_median else ""


def _percent(share: object) -> str:
    return f"{share:.0%}" if isinstance(share, int | float) else "–"


def data_parts(material: Material) -> Iterator[object]:
    """Files, malformed rows, altered ids and accepted changes."""
    bad = material.last("malformed_rows")
    if bad:
        where = [str(line.values.get("location")) for line in material.events("rows_put_aside")]
        yield element(
            "p", f"{bad:,.0f} malformed rows were left out. They are listed in {(where or ['malformed/'])[-1]}."
        )
    elif material.num_measured:
        yield element("p", "No malformed row was left out.")
    for line in material.events("ids_altered", "data_files_changed", "input_record_damaged"):
        yield element("p", line.text)
    for change in material.description.input_changes:
        yield element("p", f"From step {change.step:,} on, data files are others: {'; '.join(change.changes[:5])}.")
    if material.files is None:
        yield element("p", "The run has no record of its data files.")
        return
    files = [("training", file) for file in material.files.training]
    files += [("evaluation", file) for file in material.files.evaluation]
    rows = [(file.path, use, f"{file.num_rows:,}", format_bytes(file.size_bytes)) for use, file in files[:MOST_ROWS]]
    if len(files) > MOST_ROWS:
        yield element("p", f"The first {MOST_ROWS} of {len(files):,} files are shown.", class_="note")
    yield folded(
        f"Data files ({len(files):,})",
        table("Data files", ["file", "for", "rows", "size"], rows),
        is_open=len(files) < 9,
    )


def environment(material: Material) -> Html:
    """Versions, and what drivers said of machines and devices."""
    items: list[tuple[str, object]] = list(material.versions.items())
    for settings in material.description.settings:
        items.append((f"From step {settings.step:,} on", settings.describe()))
    told = material.events("devices_found", "hosts_share_machines", "niceness_found", "versions_differ")
    items += [(worded(line.kind), line.text) for line in told[-8:]]
    if material.stream.num_drivers:
        items.append(("Drivers that measured", f"{material.stream.num_drivers:,}"))
    began = material.stream.points[0].unix_s if material.stream.points else None
    if began is not None:
        ended = material.stream.points[-1].unix_s
        items.append(("Measured", f"{date(began)}, for {format_duration(ended - began)}"))
    return pairs(items) if items else element("p", "Nothing is known of it.")


def command_parts(material: Material) -> Iterator[object]:
    for title, line, note in commands_of(material):
        yield element("h4", title)
        yield command(line)
        if note:
            yield element("p", note, class_="note")
