"""What must hold after a round of `podembed chaos`, whatever was done to the run: the oracles O1 to O6, and the
expectations of its schedule.

Each looks at what is left: the run's folder, the records of the faults, the processes of this machine. It does not look
at what the run says of itself; only times come from the driver's events. Where the question does not arise (no bytes to
compare with, nothing to detect), the verdict is `None`, so that silence meets no oracle.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from podembed.jobs.chaos.plan_file import describe
from podembed.jobs.chaos.round import Round
from podembed.jobs.event_log import LoggedEvent
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.events.progress import WindowTrained
from podembed.orchestrator.events.run import DriverBegan, DriverEnded, GenerationLost, Recovered
from podembed.orchestrator.run.reference import CommittedState, open_commit
from podembed.serving.committed_rows import row_batches
from podembed.tools.fsck.check import check_run
from podembed.tools.inspect.diff import diff
from podembed.workers.faults.inject import FaultRecord
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store

GONE_WITHIN_S = 20.0
_WORKERS = (b"_HostActor", b"_DeviceActor")
_STRIKES = frozenset({"kill", "stop", "kill_midway", "cut", "drop", "duplicate", "truncate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one oracle says. `is_met` is None where it has nothing to say."""

    oracle: str
    is_met: bool | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All verdicts of a round, and the times that were measured; None where nothing was to be detected or mended."""

    round: Round
    verdicts: tuple[Verdict, ...]
    detect_s: float | None
    recover_s: float | None

    @property
    def is_met(self) -> bool:
        return all(verdict.is_met is not False for verdict in self.verdicts)

    def of(self, oracle: str) -> bool | None:
        return next((verdict.is_met for verdict in self.verdicts if verdict.oracle == oracle), None)

    @property
    def complaints(self) -> list[str]:
        return [f"{v.oracle}: {v.why}" for v in self.verdicts if v.is_met is False]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What rounds are held against.

    Attributes:
      reference: folder of the undisturbed run, with all its commits.
      audit: name of the audit table; None if the job has none.
      mark: in the environment of every process of the campaign.
      detect_s, recover_s: longest times from a strike to its notice, and from there to the next finished window.
    """

    reference: str
    audit: str | None
    mark: bytes
    detect_s: float
    recover_s: float


def judge(found: Round, measure: Measure) -> Judgement:
    """Asks every oracle about a round."""
    detect_s, recover_s = times_of(found)
    verdicts = [_ending(found), _strikes(found), _told(found)]
    head = _head(found.url)
    if head is None:
        nothing = "nothing was committed"
        verdicts += [Verdict(oracle=f"O{n}", is_met=None, why=nothing) for n in (1, 2, 3, 6)]
        if found.schedule.is_finished:
            verdicts.append(Verdict(oracle="end", is_met=False, why=nothing))
    else:
        verdicts += [
            _safely("O1", lambda: _same_bytes(found, head, measure)),
            _safely("O2", lambda: _samples(found, head, measure)),
            _safely("O3", lambda: _intact(found)),
            _safely("O6", lambda: _counters(head, measure)),
        ]
    verdicts += [_in_time(found, measure, detect_s, recover_s), _nothing_left(found, measure)]
    return Judgement(round=found, verdicts=tuple(verdicts), detect_s=detect_s, recover_s=recover_s)


# ---------------------------------------------------------------------- the schedule's own expectations


def _ending(found: Round) -> Verdict:
    expected = sorted(found.schedule.exit_codes)
    if found.exit_code is None:
        return Verdict(oracle="end", is_met=False, why=f"it did not end within its time; expected exit code {expected}")
    is_met = found.exit_code in found.schedule.exit_codes
    if is_met and found.schedule.rival == "takes_over" and found.rival_exit_code != 0:
        return Verdict(oracle="end", is_met=False, why=f"the driver that took over ended with {found.rival_exit_code}")
    if is_met and found.schedule.rival == "asks" and found.rival_exit_code != 87:
        return Verdict(oracle="end", is_met=False, why=f"the second driver ended with {found.rival_exit_code}, not 87")
    return Verdict(oracle="end", is_met=is_met, why=f"exit code {found.exit_code}, expected {expected}")


def _strikes(found: Round) -> Verdict:
    """A schedule whose faults never struck has shown nothing."""
    struck = {record.fault for record in found.records}
    missing = [describe(fault) for at, fault in enumerate(found.schedule.faults) if at not in struck]
    if found.schedule.number == "random":
        missing = missing if not struck else []
    return Verdict(oracle="struck", is_met=not missing, why=f"never struck: {'; '.join(missing)}")


def _told(found: Round) -> Verdict:
    tells = found.schedule.tells
    missing = [told.describe() for told in tells if not any(told.is_met(one.kind, one.values) for one in found.events)]
    return Verdict(oracle="told", is_met=not missing if tells else None, why=f"not told: {'; '.join(missing)}")


# ---------------------------------------------------------------------- O1, O2, O3, O6: what was committed


def _head(url: str) -> CommittedState | None:
    store = Store(url)
    try:
        return open_commit(url) if read_lineage(store) else None
    except (StorageError, OSError, ValueError):
        return None


def _safely(oracle: str, ask: Callable[[], Verdict]) -> Verdict:
    """An oracle that meets damage has its answer."""
    try:
        return ask()
    except (StorageError, ValueError) as error:
        return Verdict(oracle=oracle, is_met=False, why=str(error)[:300])


def _at_step(url: str, step: int) -> CommittedState | None:
    """The commit of the lineage that was made after so many steps."""
    for name in read_lineage(Store(url)):
        parsed = parse_commit_name(name)
        if parsed is not None and parsed[0] == step:
            return open_commit(f"{url}@{name}")
    return None


def _same_bytes(found: Round, head: CommittedState, measure: Measure) -> Verdict:
    if found.schedule.compares == "samples" or found.schedule.settings:
        return Verdict(oracle="O1", is_met=None, why="another number of hosts, or another job")
    reference = _at_step(measure.reference, head.manifest.step)
    if reference is None:
        # A stop commits where the undisturbed run does not.
        return Verdict(oracle="O1", is_met=None, why=f"the undisturbed run has no commit of step {head.manifest.step}")
    difference = diff(reference, head)
    differing = [f"table {t.table}: {t.num_changed} rows" for t in difference.tables if not t.is_equal]
    differing += [f"dense {leaf.key}" for leaf in difference.dense] + [
        f"{name} {v}" for name, v in difference.values.items()
    ]
    return Verdict(oracle="O1", is_met=difference.is_equal, why=f"differs in {'; '.join(differing)}")


def visits(state: CommittedState, audit: str) -> np.ndarray:
    """int64 `[rows]`: how often each sample was trained, as the audit table says."""
    table = state.table(audit)
    parts = [batch[:, 0].copy() for batch in row_batches(state.store, table, table.arrays[0])]
    return np.rint(np.concatenate(parts)).astype(np.int64)


def _samples(found: Round, head: CommittedState, measure: Measure) -> Verdict:
    """Each sample as often as in the undisturbed run, and all of them together as often as the manifest says."""
    if measure.audit is None:
        return Verdict(oracle="O2", is_met=None, why="the job's data names no sample ids")
    counted = visits(head, measure.audit)
    claimed = head.manifest.counters["samples"]
    if int(counted.sum()) != claimed:
        return Verdict(oracle="O2", is_met=False, why=f"{int(counted.sum())} visits, the manifest says {claimed}")
    lowest, highest = int(counted.min()), int(counted.max())
    # Every epoch trains each sample once, so inside of one they differ by one.
    if highest - lowest > 1:
        return Verdict(oracle="O2", is_met=False, why=f"samples were trained between {lowest} and {highest} times")
    reference = None if found.schedule.settings else _at_step(measure.reference, head.manifest.step)
    if reference is not None:
        wrong = np.flatnonzero(visits(reference, measure.audit) != counted)
        if len(wrong):
            return Verdict(
                oracle="O2", is_met=False, why=f"{len(wrong)} samples more or less often, such as {wrong[0]}"
            )
    return Verdict(oracle="O2", is_met=True, why=f"{claimed} visits, {lowest} to {highest} of each sample")


def _intact(found: Round) -> Verdict:
    check = check_run(found.url)
    first = check.all_findings[:1]
    if found.schedule.damages:
        return Verdict(oracle="O3", is_met=not check.is_intact, why="the damage was not found")
    return Verdict(oracle="O3", is_met=check.is_intact, why=f"{first[0].file}: {first[0].found}" if first else "")


def _counters(head: CommittedState, measure: Measure) -> Verdict:
    """What was consumed is what was trained and what was skipped; the undisturbed run counts the same."""
    reference = _at_step(measure.reference, head.manifest.step)
    if reference is None:
        return Verdict(oracle="O6", is_met=None, why=f"the undisturbed run has no commit of step {head.manifest.step}")
    same = dict(reference.manifest.counters) == dict(head.manifest.counters)
    why = f"counters {dict(head.manifest.counters)}, undisturbed {dict(reference.manifest.counters)}"
    return Verdict(oracle="O6", is_met=same, why=why)


# ---------------------------------------------------------------------- O4: times


def times_of(found: Round) -> tuple[float | None, float | None]:
    """Longest seconds from a strike to its notice, and from the notice to the first window that was finished after
    it.
    """
    detected, recovered = [], []
    for record in found.records:
        if record.action not in _STRIKES:
            continue
        noticed = _first(found.events, record.unix_s, partial(_is_notice, record))
        if noticed is None:
            continue
        detected.append(noticed.unix_s - record.unix_s)
        running = _first(found.events, noticed.unix_s, lambda event: event.kind == WindowTrained.kind)
        if running is not None:
            recovered.append(running.unix_s - noticed.unix_s)
    return max(detected, default=None), max(recovered, default=None)


def _is_notice(record: FaultRecord, event: LoggedEvent) -> bool:
    if event.kind == DriverBegan.kind and event.process != record.process:
        return True
    return event.kind in (GenerationLost.kind, Recovered.kind, DriverEnded.kind) and record.rank != "driver"


def _first(
    events: Sequence[LoggedEvent], after_unix_s: float, wanted: Callable[[LoggedEvent], bool]
) -> LoggedEvent | None:
    return next((event for event in events if event.unix_s > after_unix_s and wanted(event)), None)


def _in_time(found: Round, measure: Measure, detect_s: float | None, recover_s: float | None) -> Verdict:
    longest_detect = measure.detect_s if found.schedule.detect_s is None else found.schedule.detect_s
    longest_recover = measure.recover_s if found.schedule.recover_s is None else found.schedule.recover_s
    if detect_s is None and recover_s is None:
        return Verdict(oracle="O4", is_met=None, why="nothing to detect")
    is_met = (detect_s or 0.0) <= longest_detect and (recover_s or 0.0) <= longest_recover
    return Verdict(
        oracle="O4",
        is_met=is_met,
        why=f"detected in {_seconds(detect_s)} (longest {longest_detect:g}), recovered in {_seconds(recover_s)} "
        f"(longest {longest_recover:g})",
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.1f} s"


# ---------------------------------------------------------------------- O5: what is left


def _nothing_left(found: Round, measure: Measure) -> Verdict:
    """No worker or driver of the round lives, no shared memory has a name, no temporary file is in the run."""
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while (left := lingering(measure.mark)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    named = [name for name in os.listdir("/dev/shm") if "podembed" in name]
    # What a killed process was writing stays; the keep policy removes it when it is a day old.
    is_killed = any(record.action in ("kill", "kill_midway") for record in found.records)
    torn = [] if is_killed else [path.name for path in Path(found.url).rglob(".tmp-*")]
    why = "; ".join([*left, *(f"/dev/shm/{name}" for name in named), *torn])
    return Verdict(oracle="O5", is_met=not (left or named or torn), why=f"left: {why}")


def lingering(mark: bytes) -> list[str]:
    """Worker and driver processes of the campaign that live."""
    found = []
    for process in marked(mark):
        title = _read(f"/proc/{process}/cmdline")
        if any(worker in title for worker in _WORKERS) or b"--fault-plan" in title:
            found.append(f"process {process} {title.replace(bytes(1), b' ')[:60].decode(errors='replace').strip()}")
    return found


def marked(mark: bytes) -> list[int]:
    """All processes that inherited the mark."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if number != os.getpid() and mark in _read(f"/proc/{number}/environ")]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
