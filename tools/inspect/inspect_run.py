"""What a run's folder holds, for people: its record, its commits, and how to read a table without us.

`describe` reads manifests and returns a value; `render` turns it into text. No array is opened, so both are quick on
any size, but for one number a row of tables in which keys wait.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from podembed.orchestrator.api.save_policies import order_of
from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.orchestrator.api.vocabulary_totals import totals_of
from podembed.orchestrator.commit.checkpoint import CommitInfo, list_commits
from podembed.orchestrator.commit.holder import Heartbeat, read_heartbeat
from podembed.orchestrator.commit.lease_files import read_claims
from podembed.orchestrator.commit.manifest import Manifest, TableFiles
from podembed.orchestrator.commit.run_record import SHUFFLED, RunRecord, TableRecord, find_run
from podembed.orchestrator.run.history_record import HistoryRecord, read_history
from podembed.orchestrator.run.input_record import AcceptedChange, read_input, shortened
from podembed.orchestrator.run.job_settings import SettingsRecord, read_settings
from podembed.serving.committed_rows import row_batches
from podembed.workers.checkpoint.arrays import safe_segment
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store

SHOWN_EVALUATIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A run at one moment.

    Attributes:
      record: None if the folder is no run.
      generation: the highest claimed; 0 before the first driver.
      heartbeat: heartbeat of that generation, if its driver left one.
      commits: commits that count, newest first, then leftovers.
      input_changes: of its data files, accepted since it began.
      settings: changed arguments of the job, oldest first.
      history: loss and evaluations up to the newest commit; None if its record is damaged.
      damaged: records of data files that cannot be read.
      waiting: by table that lets keys wait for a row, how many do at the newest commit; None where its files are
        damaged.
    """

    location: str
    described_unix_s: float
    record: RunRecord | None
    generation: int
    heartbeat: Heartbeat | None
    commits: tuple[CommitInfo, ...]
    input_changes: tuple[AcceptedChange, ...]
    history: HistoryRecord | None
    damaged: tuple[str, ...] = ()
    settings: tuple[SettingsRecord, ...] = ()
    waiting: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def head(self) -> CommitInfo | None:
        return next((commit for commit in self.commits if commit.is_head), None)

    @property
    def tables(self) -> tuple[TableRecord, ...]:
        """The tables as recorded, with the rows that they have now: a capacity may have been raised since the run
        began.
        """
        tables = self.record.tables if self.record else ()
        committed = self.head.manifest.tables if self.head and self.head.manifest else ()
        rows = {table.name: table.num_rows for table in committed if table.is_dynamic}
        return tuple(replace(table, num_rows=rows.get(table.name, table.num_rows)) for table in tables)


def describe(store: Store, *, now_unix_s: float) -> RunDescription:
    """Reads what `render` shows. Damaged manifests are part of the answer, not errors.

    Raises:
      DocumentRefused: RUN.json or a base is damaged, so nothing can be said about which commits count.
    """
    claims, known = read_claims(store), read_input(store)
    commits = list_commits(store)
    head = next((commit for commit in commits if commit.is_head), None)
    return RunDescription(
        location=store.location,
        described_unix_s=now_unix_s,
        record=find_run(store),
        generation=claims[-1] if claims else 0,
        heartbeat=read_heartbeat(store, claims[-1]) if claims else None,
        commits=commits,
        input_changes=known.accepted,
        settings=read_settings(store),
        history=_history(store, head.step if head else 0),
        damaged=tuple(error.name for error in known.damaged),
        waiting=_waiting(store, head.manifest) if head and head.manifest else {},
    )


def _history(store: Store, step: int) -> HistoryRecord | None:
    try:
        return read_history(store).cut(step)
    except StorageError:
        return None


def _waiting(store: Store, manifest: Manifest) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for table in manifest.tables:
        array = next((array for array in table.arrays if table.is_dynamic and array.name == "waiting_last"), None)
        if array is None:
            continue
        try:
            found[table.name] = sum(int(np.count_nonzero(rows)) for rows in row_batches(store, table, array))
        except StorageError:
            found[table.name] = None
    return found


def render(description: RunDescription) -> str:
    """Text of the description, ready to print."""
    parts = [_header(description), _commits(description), *_evaluations(description)]
    head = description.head
    if head and head.manifest:
        tables = head.manifest.tables
        parts.append(f"Tables of {head.name}\n" + columns(_table_lines(tables)))
        parts += _keys(head.manifest, description.waiting)
        parts += [reading_example(description.location, tables[0])] if tables else []
    return printable("\n\n".join(parts))


def reading_example(location: str, table: TableFiles, array: int = 0) -> str:
    """Three lines of Python that read one array of a table with zarr, and the way without it: zarr is not installed
    with this program.

    Position p of bucket b is row p·V + b, so swapping the first two axes puts the rows in order. The last bucket's
    padding is cut off.
    """
    files = table.arrays[array]
    path = f"{location.rstrip('/')}/{files.path}"
    if table.deltas:
        return (
            f"Table '{table.name}' is a full commit and {plural(len(table.deltas), 'delta')}. To read it with zarr "
            f"alone, make it one: podembed compact {location}. To get rows out: podembed export, podembed extract."
        )
    words = ["podembed", "export", location, "--table", table.name, "--out", f"{safe_segment(table.name)}.npy"]
    words += ["--slots"] if array else []
    return (
        f"Read table '{table.name}' in Python with zarr (install it first: pip install 'zarr>=3'):\n"
        f"  import zarr\n"
        f'  array = zarr.open({path!r}, mode="r")  # [bucket, position, column]\n'
        f"  {files.name if files.name.isidentifier() else 'values'} = "
        f"array[:].transpose(1, 0, 2).reshape(-1, {files.width})[:{table.num_rows}]\n"
        f"Without zarr, as a file for numpy.load: {shlex.join(words)}"
    )


def format_age(seconds: float) -> str:
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds / size))} {unit}"
    return f"{int(seconds / 86400)} d"


def _header(description: RunDescription) -> str:
    record = description.record
    if record is None:
        return f"{description.location} is not a run: RUN.json is missing."
    age = format_age(description.described_unix_s - record.created_unix_s)
    job = f"{record.job_function} {record.job_arguments}" if record.job_function else "given as a value"
    what = (
        f"Job {job}; batch {record.batch_size}, {record.num_lanes} lanes, seed {record.seed}, staleness "
        f"{record.staleness}, "
        f"wire {record.wire_dtype}, samples {'shuffled' if record.order == SHUFFLED else 'in the order of the files'}"
    )
    lines = [
        f"Run {record.run_id} in {description.location}, created {age} ago",
        "Imported tables without a job; others begin from it by --warm-start" if record.is_imported else what,
        f"Generation {description.generation}{_holder(description)}",
    ]
    if record.warm_start is not None:
        start = record.warm_start
        rules = f" with {' '.join(start.rules)}" if start.rules else ""
        lines.append(f"Began from {start.commit} of run {start.run_id} in {start.location}{rules}")
    lines += [
        f"From step {change.step} on other input, accepted "
        f"{format_age(description.described_unix_s - change.accepted_unix_s)} ago: {shortened(change.changes)}"
        for change in description.input_changes
    ]
    lines += [f"{name} is DAMAGED; podembed fsck says what follows" for name in description.damaged]
    lines += [
        f"From step {change.step} on {change.describe()}, set "
        f"{format_age(description.described_unix_s - change.changed_unix_s)} ago"
        for change in description.settings
    ]
    return "\n".join(lines)


def _holder(description: RunDescription) -> str:
    beat = description.heartbeat
    if beat is None:
        return ", no driver"
    age = format_age(description.described_unix_s - beat.written_unix_s)
    return f", driver {beat.holder.submission} (process {beat.holder.process} on {beat.holder.hostname}) seen {age} ago"


def _commits(description: RunDescription) -> str:
    if not description.commits:
        return "No commits yet"
    rows = [("commit", "step", "gen", "parent", "age", "size", "written", "hosts", "")]
    rows += [_commit_line(commit, description.described_unix_s) for commit in description.commits]
    return "Commits\n" + columns(rows)


def _evaluations(description: RunDescription) -> list[str]:
    """The newest evaluations and the best one, and the loss of the last steps; nothing where none were recorded."""
    history = description.history
    if history is None:
        return [
            "Loss and evaluations: the record is damaged. podembed fsck names it; delete the file, nothing else needs "
            "it"
        ]
    parts = []
    if history.windows:
        last = history.windows[-1]
        parts.append(f"Loss {last.loss:.4f} in steps {last.first_step} to {last.step - 1}")
    if history.evaluations:
        # Of a metric of the job's own whose name says nothing only the job knows which end is the best.
        bests = {
            name: history.best(name) if order_of(name) is not None else None
            for name in sorted(history.evaluations[-1].metrics)
        }
        steps = {made.step for made in history.evaluations[-SHOWN_EVALUATIONS:]} | {
            best.step for best in bests.values() if best
        }
        shown = [made for made in history.evaluations if made.step in steps]
        names = {commit.step: commit.name for commit in description.commits if commit.counts}
        rows = [("step", "gen", "samples", *bests, "commit")]
        for made in shown:
            values = [
                f"{made.metrics[name]:.4f}{' best' if best and best.step == made.step else ''}"
                if name in made.metrics
                else "-"
                for name, best in bests.items()
            ]
            samples = f"{made.num_samples:,}"
            rows.append((str(made.step), str(made.generation), samples, *values, names.get(made.step, "none kept")))
        count = len(history.evaluations)
        head = (
            "Evaluations"
            if count == len(shown)
            else f"Evaluations, the newest {SHOWN_EVALUATIONS} of {count} and the best"
        )
        parts.append(f"{head}\n{columns(rows)}")
    return parts


def _commit_line(commit: CommitInfo, now_unix_s: float) -> tuple[str, ...]:
    state = "head" if commit.is_head else "" if commit.counts else "leftover, does not count"
    manifest = commit.manifest
    if manifest is None:
        state = f"{state or 'lineage'}, DAMAGED: {commit.problem}"
        return (commit.name, str(commit.step), str(commit.generation), "?", "?", "?", "?", "?", state)
    age = format_age(now_unix_s - manifest.created_unix_s)
    size = format_bytes(manifest.size_bytes)
    parent = manifest.parent or "-"
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(manifest.metrics.items()))
    state = "; ".join(filter(None, (state, metrics)))
    kind = f"delta {manifest.num_deltas}, " if manifest.num_deltas else "full, "
    written = kind + format_bytes(manifest.written_bytes)
    return (
        commit.name,
        str(commit.step),
        str(commit.generation),
        parent,
        age,
        size,
        written,
        str(manifest.hosts),
        state,
    )


def _table_lines(tables: tuple[TableFiles, ...]) -> list[tuple[str, ...]]:
    rows = [("table", "rows", "dim", "buckets", "slots", "size")]
    for table in tables:
        slots = ", ".join(f"{slot.name} ({slot.width})" for slot in table.slots) or "-"
        slots += "; keys come and go" if table.is_dynamic else ""
        sizes = (f"{table.num_rows:,}", str(table.dim), str(table.num_buckets), slots, format_bytes(table.size_bytes))
        rows.append((table.name, *sizes))
    return rows


def _keys(manifest: Manifest, waiting: Mapping[str, int | None]) -> list[str]:
    """How full tables are whose keys come and go, and what became of their keys; nothing where there are none."""
    names = ("num_keys", "num_rows", "admitted", "evicted", "refused", "dropped")
    rows: list[tuple[str, ...]] = [("table", "keys", "of rows", "fill", "waiting", *names[2:])]
    for table in (table for table in manifest.tables if table.is_dynamic):
        totals, waits = totals_of(manifest.counters, table.name), waiting.get(table.name, 0)
        keys, room, *others = ["?"] * len(names) if totals is None else [f"{getattr(totals, name):,}" for name in names]
        fill = "?" if totals is None else f"{totals.num_keys / max(1, totals.num_rows):.1%}"
        rows.append((table.name, keys, room, fill, "?" if waits is None else f"{waits:,}", *others))
    head = f"Keys that come and go at {manifest.name}; admitted, evicted, refused and dropped since the run began"
    return [f"{head}\n{columns(rows)}"] if len(rows) > 1 else []
