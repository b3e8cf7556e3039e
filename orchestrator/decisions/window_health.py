"""`WindowHealth`: what the windows of one generation say about its hosts, reported once and not in every window.

The driver shows it each window. It keeps the little that a judgement needs. The times of the last steps give the
deadlines of the next ones. Counts say for how many windows in a row a host was slow, or an owner got too many requests.
A finding is reported when it has lasted for `WINDOWS` windows, and again when it changes: another phase, another table,
or over.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence

from podembed.embedding.vocabulary.policies import VocabularyCounts
from podembed.orchestrator.api.config import FailureConfig
from podembed.orchestrator.decisions.stragglers import (
    WELL_RATIO,
    Imbalance,
    imbalance,
    is_notable,
    slow_hosts,
    work_ratios,
)
from podembed.orchestrator.events.event import Emit, Event
from podembed.orchestrator.events.progress import (
    BucketsFullEarly,
    HostKeepsUp,
    HostSlow,
    IdsAltered,
    KeysRefused,
    KeysReturned,
    OwnerBusy,
    OwnersEven,
)
from podembed.orchestrator.group.watch import Deadlines
from podembed.workers.host.spec import HostWindow, ScoredSamples
from podembed.workers.liveness.progress import Phase

WINDOWS = 3
_KEPT_STEPS = 20
# Of the keys that get a row in a window, how many had lost one before it is told.
MANY_RETURNED, RETURNED_SHARE = 100, 0.1
# Of all rows, how many have a key when buckets that keys fall into by chance begin to be full.
EVEN_FILL = 0.75


class _Lasting:
    """A finding that must hold for `WINDOWS` windows to be reported, and be absent for as many to be over. Mutable."""

    def __init__(self) -> None:
        self._candidate: Hashable = None
        self._count = 0
        self.told: Hashable = None

    def see(self, found: Hashable) -> bool:
        """Whether `found` (None for nothing) has now lasted and differs from what was reported last. It then counts as
        reported.
        """
        self._count = self._count + 1 if found == self._candidate else 1
        self._candidate = found
        if self._count < WINDOWS or found == self.told:
            return False
        self.told = found
        return True


class WindowHealth:
    """See the module.

    Args:
      deadlines: deadlines that the group began with.
      is_fixed: whether the user set the deadline of a step.
      tables: names, for the events.
      invalid_ids: by table, what happens to ids outside its vocabulary.
      emit: told them by `take`.

    Attributes:
      slowest: the largest ratio of a host's own work to the others' in the last window.
      imbalance: imbalance of the last window.
    """

    def __init__(
        self, deadlines: Deadlines, *, is_fixed: bool, tables: Sequence[str], invalid_ids: Sequence[str], emit: Emit
    ) -> None:
        self._deadlines = deadlines
        self._is_fixed = is_fixed
        self._tables = tables
        self._invalid_ids = invalid_ids
        self._owners: Mapping[str, Sequence[int]] = {}
        self._emit = emit
        self._step_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        # By host: that it is slow, and by which phase. Where all phases are slow, the one that loses the most is
        # another in each window.
        self._slow: dict[int, tuple[_Lasting, _Lasting]] = {}
        self._uneven = _Lasting()
        self._altered: set[int] = set()
        # Events of tables that were told, each with the table.
        self._told_keys: set[tuple[type[Event], int]] = set()
        self.slowest = 1.0
        self.imbalance = Imbalance(ratio=1.0, host=0, table=0, rows=0)

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of the next window."""
        return self._deadlines.for_steps(self._step_s, is_fixed=self._is_fixed)

    @staticmethod
    def of(config: FailureConfig, tables: Sequence[str], *, invalid_ids: Sequence[str], emit: Emit) -> WindowHealth:
        """The health of a group that begins."""
        step_s = config.worker_step_timeout_s
        deadlines = Deadlines(start_s=config.start_timeout_s, step_s=step_s, storage_s=step_s)
        return WindowHealth(
            deadlines,
            is_fixed=config.step_timeout_s is not None,
            tables=tables,
            invalid_ids=invalid_ids,
            emit=emit,
        )

    def placed(self, owners: Mapping[str, Sequence[int]]) -> None:
        """Takes in the owner of each bucket, by table: whether a busy owner has much of a table shows the cause."""
        self._owners = owners

    def take(self, hosts: Sequence[HostWindow], *, seconds: float, num_steps: int) -> Deadlines:
        """Takes a window in, emits what should be reported, and returns the deadlines of the next one."""
        for told in self.window(hosts, seconds=seconds, num_steps=num_steps):
            self._emit(told)
        return self.deadlines

    def window(self, hosts: Sequence[HostWindow], *, seconds: float, num_steps: int) -> list[Event]:
        """Takes a window in. Returns what should be reported about it."""
        self._step_s.append(seconds / num_steps)
        phase_s = [host.phase_s for host in hosts]
        self.slowest = max(work_ratios(phase_s), default=1.0)
        self.imbalance = imbalance([host.rows_asked for host in hosts])
        uneven = self._tell_uneven([self._movable(host.rows_asked) for host in hosts], seconds)
        altered = self._tell_altered([host.altered_ids for host in hosts])
        return [*self._tell_slow(phase_s, seconds), *uneven, *altered, *self._tell_keys(hosts)]

    def _tell_slow(self, phase_s: Sequence[Mapping[Phase, float]], window_s: float) -> list[Event]:
        slow = {found.host: found for found in slow_hosts(phase_s, window_s=window_s)}
        limping = {found.host for found in slow_hosts(phase_s, window_s=window_s, ratio=WELL_RATIO)}
        told: list[Event] = []
        for host in range(len(phase_s)):
            lasting, by_phase = self._slow.setdefault(host, (_Lasting(), _Lasting()))
            found: HostSlow | None = slow.get(host)
            if found is None and host in limping and lasting.told is not None:
                continue  # neither slow nor well: what was reported still holds
            was_slow, is_other_phase = lasting.told is not None, by_phase.see(found and found.phase)
            if not lasting.see(found and host) and not (found and was_slow and is_other_phase):
                continue
            by_phase.told = found and found.phase
            told += [found] if found else [HostKeepsUp(host=host)] if was_slow else []
        return told

    def take_evaluation(self, hosts: Sequence[ScoredSamples]) -> None:
        """Takes an evaluation in, and emits what should be reported."""
        for told in self._tell_altered([host.altered_ids for host in hosts]):
            self._emit(told)

    def _tell_altered(self, of_hosts: Sequence[Sequence[int]]) -> list[Event]:
        """Once a table: a vocabulary that is too small, or a wrong column, shows here first."""
        counts = [sum(of_table) for of_table in zip(*of_hosts, strict=True)]
        new = [at for at, count in enumerate(counts) if count and at not in self._altered]
        self._altered.update(new)
        return [IdsAltered(table=self._tables[at], count=counts[at], invalid_ids=self._invalid_ids[at]) for at in new]

    def _tell_keys(self, hosts: Sequence[HostWindow]) -> list[Event]:
        """Once a table: one that is full learns nothing of new keys, and one that forgets what comes back little."""
        told: list[Event] = []
        for at in sorted({at for host in hosts for at in host.vocabularies}):
            counts = [host.vocabularies[at] for host in hosts if at in host.vocabularies]
            found = _found_of_keys(self._tables[at], _summed(counts))
            new = [event for event in found if (type(event), at) not in self._told_keys]
            self._told_keys.update((type(event), at) for event in new)
            told += new
        return told

    def _movable(self, rows_asked: Sequence[int]) -> list[int]:
        """Rows by table, without those of tables that are one bucket, which cannot be spread over hosts."""
        whole = {at for at, name in enumerate(self._tables) if len(self._owners.get(name, ())) == 1}
        return [0 if at in whole else rows for at, rows in enumerate(rows_asked)]

    def _tell_uneven(self, rows_asked: Sequence[Sequence[int]], window_s: float) -> list[Event]:
        """Args: rows_asked: per owner and table, those that could be asked of other owners."""
        found, num_hosts = imbalance(rows_asked), len(rows_asked)
        was_uneven, is_told = self._uneven.told is not None, is_notable(found, num_hosts, window_s=window_s)
        if not self._uneven.see((found.host, found.table) if is_told else None):
            return []
        if self._uneven.told is None:
            return [OwnersEven()] if was_uneven else []
        name = self._tables[found.table] if found.table < len(self._tables) else f"number {found.table}"
        owners = self._owners.get(name, ())
        return [
            OwnerBusy(
                host=found.host,
                ratio=found.ratio,
                rows=found.rows,
                table=name,
                held_buckets=sum(owner == found.host for owner in owners),
                num_buckets=len(owners),
                num_hosts=num_hosts,
            )
        ]


def _summed(counts: Sequence[VocabularyCounts]) -> VocabularyCounts:
    names = [field.name for field in dataclasses.fields(VocabularyCounts)]
    return VocabularyCounts(**{name: sum(getattr(one, name) for one in counts) for name in names})


def _found_of_keys(table: str, counts: VocabularyCounts) -> Iterator[Event]:
    """What should be told of the keys of a table in a window."""
    keys, rows = counts.num_keys, counts.num_rows
    if counts.refused:
        yield KeysRefused(table=table, count=counts.refused, num_keys=keys, num_rows=rows)
    if counts.returned >= MANY_RETURNED and counts.returned > counts.admitted * RETURNED_SHARE:
        yield KeysReturned(table=table, returned=counts.returned, admitted=counts.admitted)
    if counts.num_full and keys < rows * EVEN_FILL:
        full, fill = counts.num_full, keys / rows
        yield BucketsFullEarly(table=table, num_full=full, num_buckets=counts.num_buckets, fill=fill)
