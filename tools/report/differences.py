"""What differs between runs, of all that they record: the job, its arguments, steps, data, hosts and versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from podembed.orchestrator.api.text import format_bytes, plural
from podembed.tools.report.material import Material

_DEFAULT = "its default"
_UNKNOWN = "–"


def differences(materials: Sequence[Material]) -> list[tuple[str, ...]]:
    """Rows of what is not the same in all runs: what it is, and its value in each run."""
    settings = [dict(_settings(material)) for material in materials]
    names = list(dict.fromkeys(name for one in settings for name in one))
    rows = []
    for name in names:
        missing = _DEFAULT if name.startswith("argument ") else _UNKNOWN
        values = [one.get(name, missing) for one in settings]
        if len(set(values)) > 1:
            rows.append((name, *values))
    return rows


def _settings(material: Material) -> Iterator[tuple[str, str]]:
    """Everything that is recorded of a run and can be compared, in the order in which it is shown."""
    record = material.description.record
    if record is not None:
        yield "job", record.job_function or "a value"
        yield from _arguments(material)
        yield "batch", f"{record.batch_size:,}"
        yield "seed", f"{record.seed}"
        yield "order of samples", record.order
        yield "staleness", f"{record.staleness}"
        yield "numbers on the wire", record.wire_dtype
        yield "lanes", f"{record.num_lanes}"
        yield "first accumulator", f"{record.initial_accumulator_value:g}"
        if record.warm_start is not None:
            yield "began from", f"{record.warm_start.commit} in {record.warm_start.location}"
        yield "samples of an epoch", f"{record.num_samples:,}"
        # Files with equal names, sizes, times and rows have the same.
        yield "fingerprint of the data files", record.input_fingerprint[:12]
    if material.files is not None:
        for use, files in (("training", material.files.training), ("evaluation", material.files.evaluation)):
            size = format_bytes(sum(file.size_bytes for file in files))
            yield f"{use} files", f"{plural(len(files), 'file')}, {sum(file.num_rows for file in files):,} rows, {size}"
    planned = material.last("steps_planned")
    if planned is not None:
        yield "steps planned", f"{planned:,.0f}"
    hosts = sorted({int(value) for _, value in material.stream.series("hosts")})
    if hosts:
        yield "hosts", ", ".join(map(str, hosts))
    for line in material.events("devices_found")[-1:]:
        yield "devices", line.text
    for package, version in sorted(material.versions.items()):
        yield f"version of {package}", version
    for table in material.description.tables:
        yield f"table {table.name}", f"{table.num_rows:,} rows, dim {table.dim}, {table.slots_in_words}"


def _arguments(material: Material) -> Iterator[tuple[str, str]]:
    """Arguments of the job's function, with the steps from which on changed ones count."""
    record = material.description.record
    assert record is not None
    try:
        arguments = json.loads(record.job_arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        yield "arguments", record.job_arguments
        return
    told = {name: json.dumps(value) for name, value in arguments.items()}
    for settings in material.description.settings:
        for change in settings.changes:
            told[change.name] = f"{told.get(change.name, _DEFAULT)}; {change.after} from step {settings.step:,} on"
    yield from ((f"argument {name}", value) for name, value in told.items())
