"""`SavePace`: how much processor time a save takes while training goes on beside it.

Reading, hashing and writing a shard as fast as threads can helps no one, since the next commit is far away. Where
processors are few, training pays for it, on all hosts at once, since each waits for the others. A save therefore lets
the step that follows it pass, since that pays already: it copies each row that it touches. From then on it may be busy
for a share of the time that has passed, and pauses when it is ahead of that. A small shard gets a smaller share than a
large one, and both are written soon. The fuller the buffer for changed rows, the faster it goes. Also within a file
that is written past the page cache there are short rests, so that no step pays for a whole one.
Where there are many processors the share is more than all of its threads, and nothing pauses any more.

Nothing pauses, either, where waiting would cost more than it saves. The working thread rests while the driver waits for
this very commit, and the buffer may be nearly full. If training had to wait for room, the next save of the
same kind does not pause until it is past that point. It pays for that with a longer pause afterwards.

The saving thread of a host or of a device process calls this; what the working thread does it reads from the tracker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from podembed.workers.liveness.progress import Tracker
from podembed.workers.processors import number_of_processors

# Of the machine's processors, at most: two hosts on one machine then take a fifth of it.
SHARE_OF_PROCESSORS = 0.1
LEAST_SHARE = 0.025
# Between the two a save gets as much as it needs to last so long.
WANTED_S = 15.0
# Between two windows of steps the working thread rests for less.
REST_S = 0.05
# A step may last for minutes.
LONGEST_GRACE_S = 0.5
# A pause is cut into these, so that its reasons are looked at again.
_NAP_S = 0.01
_SHORTEST_NAP_S = 0.001
# While another piece must end first.
_CROWDED_NAP_S = 0.004
# A save that is so far behind its pace has pieces that wait and do not compute, as those on a network do.
LONGEST_LAG_S = 0.1
# What a byte costs is known after so many; before, it is that of the save before, or this.
_TELLING_BYTES = 4 << 20
_FIRST_GUESS_BYTE_S = 4e-9
# Making and syncing a file takes as long as writing so many bytes. A save of many small ones would come at once.
FILE_AS_BYTES = 512 << 10
# Of all pauses that a file is worth, so much is spent within it.
_REST_SHARE = 0.6
_SHORTEST_REST_S = 2e-4
# Of the buffer for changed rows. From here on a save goes faster, twice as fast for each tenth more: all at once would
# stop a step.
_CALM_UP_TO = 0.3
_DOUBLED_EACH = 0.1
# When training did not wait in a hurried save, the next one hurries for this part of it.
_HURRY_KEPT = 0.7


class SavePace:
    """One save after another. Mutated: where the save stands, what a byte costs, and the paused seconds.

    What is handed to other threads is charged at once, by what bytes have cost so far. Counted when they end, several
    pieces would begin together, at the very beginning above all.

    Args:
      tracker: tracker of the working thread.
      longest_grace_s: most seconds until the first step; 0 for a worker that does not count its steps.
      processors: number of processors that the save may keep busy, such as 0.25; None takes `LEAST_SHARE` to
        `SHARE_OF_PROCESSORS` of those that this process may use.
      is_training: whether there is something beside it that needs the processors; None asks the tracker.

    Attributes:
      paused_s: in all saves so far, between files.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        processors: float | None = None,
        longest_grace_s: float = LONGEST_GRACE_S,
        is_training: Callable[[], bool] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tracker = tracker
        self._given = processors
        self._num_processors = number_of_processors()
        self._longest_grace_s = longest_grace_s
        self._is_told = is_training
        self._now_s, self._sleep = now_s, sleep
        self._began_s = now_s()
        self._last_step_unix_s: float | None = None
        self._total_bytes: int | None = None
        self._begun_bytes = 0
        self._last_bytes, self._last_s = 0, self._began_s
        self._kind = ""
        # By kind of save: up to where the last one hurried, and where training waited in it.
        self._hurried: dict[str, int] = {}
        self._waited_at: dict[str, int] = {}
        self._byte_s = _FIRST_GUESS_BYTE_S
        self.paused_s = 0.0

    @property
    def processors(self) -> float:
        """Number of processors that the save may keep busy."""
        if self._given is not None:
            return self._given
        most = SHARE_OF_PROCESSORS * self._num_processors
        if self._total_bytes is None:
            return most
        return min(most, max(LEAST_SHARE * self._num_processors, self._byte_s * self._total_bytes / WANTED_S))

    def begin(self, total_bytes: int | None = None, *, kind: str = "") -> None:
        """A save begins now.

        Args:
          total_bytes: bytes that it will hand over; None if that is not known.
          kind: kind of the save. Training waits for room in those of one kind at about the same point.
        """
        self._kind = kind
        self._hurried[kind] = max(self._waited_at.pop(kind, 0), int(_HURRY_KEPT * self._hurried.get(kind, 0)))
        self._total_bytes = total_bytes
        self._began_s, self._begun_bytes = self._now_s(), 0
        self._last_step_unix_s = self._tracker.progress().step_unix_s

    def let_a_step_pass(self, *, is_urgent: Callable[[], bool]) -> None:
        """Pauses until the step that follows the beginning has ended, or would wait for the save.

        Args:
          is_urgent: flag of `keep_to`.
        """
        while not is_urgent() and self._is_training() and self._lets_a_step_pass():
            self._nap(_NAP_S)

    def was_waited_for(self) -> None:
        """Training has waited for room since the last piece."""
        self._waited_at[self._kind] = self._begun_bytes

    def rest(self, num_bytes: int, *, taken: float = 0.0) -> None:
        """A short pause within a file, after so many bytes of it. From any thread.

        Args:
          taken: share of the buffer for changed rows.
        """
        if not self._is_hurrying and self._is_training():
            rest_s = _REST_SHARE * num_bytes * self._byte_s / (_speed(taken) * self.processors)
            if rest_s >= _SHORTEST_REST_S:
                self._sleep(min(_NAP_S, rest_s))

    @property
    def _is_hurrying(self) -> bool:
        return self._begun_bytes < self._hurried.get(self._kind, 0)

    def keep_to(
        self,
        num_bytes: int,
        *,
        num_files: int = 0,
        is_urgent: Callable[[], bool],
        busy_s: Callable[[], float] | None = None,
        open_bytes: Callable[[], int] = lambda: 0,
        is_crowded: Callable[[], bool] = lambda: False,
        taken: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Pauses until the next piece may begin.

        Args:
          num_bytes: size of the piece.
          num_files: number of files that are made for it.
          is_urgent: whether it must not pause any more; may raise to end the save.
          busy_s: processor seconds of the save so far, on all its threads; None leaves what a byte costs at the guess.
          open_bytes: bytes of pieces that have begun and not ended.
          is_crowded: whether there are as many of those as may be under way at a time. It holds a save up until that
            is `LONGEST_LAG_S` behind its pace.
          taken: share of the buffer for changed rows.
        """
        learned_bytes = 0
        num_bytes += num_files * FILE_AS_BYTES
        self.let_a_step_pass(is_urgent=is_urgent)
        while not is_urgent() and self._is_training():
            if self._is_hurrying:
                if not is_crowded():
                    break
                self._sleep(_CROWDED_NAP_S)
                continue
            ended_bytes = self._begun_bytes - open_bytes()
            # Only when a piece has ended. A look takes time, too, and charged to the bytes before it would prolong the
            # pause by more than a nap.
            if busy_s is not None and ended_bytes >= _TELLING_BYTES and ended_bytes != learned_bytes:
                learned_bytes, self._byte_s = ended_bytes, busy_s() / ended_bytes
            cost_s = self._byte_s * (self._begun_bytes + num_bytes)
            ahead_s = cost_s / self.processors - (self._now_s() - self._began_s)
            if ahead_s > 0 and not self._may_begin_early(taken()):
                self._nap(min(max(ahead_s, _SHORTEST_NAP_S), _NAP_S))
            elif ahead_s > -LONGEST_LAG_S and is_crowded():
                self._sleep(_CROWDED_NAP_S)
            else:
                break
        # Counted when it begins: the pace of the next piece takes this one for done.
        self._begun_bytes += num_bytes
        self._last_bytes, self._last_s = num_bytes, self._now_s()

    def _may_begin_early(self, taken: float) -> bool:
        """Whether the next piece may begin ahead of the pace, since the buffer fills."""
        speed = _speed(taken)
        return speed > 1 and self._now_s() - self._last_s > self._byte_s * self._last_bytes / (speed * self.processors)

    def _nap(self, seconds: float) -> None:
        self._sleep(seconds)
        self.paused_s += seconds

    def _lets_a_step_pass(self) -> bool:
        """Whether no step has ended since the save began. The time of the save counts from when one has."""
        if self._last_step_unix_s is None:
            return False
        now_s = self._now_s()
        if (
            self._tracker.progress().step_unix_s == self._last_step_unix_s
            and now_s - self._began_s < self._longest_grace_s
        ):
            return True
        self._last_step_unix_s, self._began_s = None, now_s
        return False

    def _is_training(self) -> bool:
        if self._is_told is not None:
            return self._is_told()
        progress = self._tracker.progress()
        return not progress.phase.is_resting or progress.phase_s < REST_S


def _speed(taken: float) -> float:
    """The factor of a save's usual pace when so much of the buffer is taken."""
    return 2 ** max(0.0, (taken - _CALM_UP_TO) / _DOUBLED_EACH)
