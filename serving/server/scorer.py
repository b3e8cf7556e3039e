"""`Scorer`: a bounded queue of requests, and the one thread that answers them.

It takes whatever waits, up to a run of the program, and answers all of it with one version. While the program runs,
more requests come together; so a busy server has larger runs, and an idle one does not wait for any.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.artifact.exported_model import Samples
from podembed.serving.server.replica import Replica, ServedVersion
from podembed.serving.server.served_model import run_size
from podembed.serving.server.shards import ShardAway

_logger = logging.getLogger(__name__)


class Busy(Exception):
    """More samples wait than may."""


class TooLate(Exception):
    """The deadline of a request was over before its turn came, so it was not scored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The outputs of a request, and what they were made with.

    Attributes:
      outputs: by name `[n, ...]`.
      version: name of the version.
      waited_s: seconds in the queue.
    """

    outputs: Mapping[str, np.ndarray]
    version: str
    number: int
    waited_s: float


@dataclass(slots=True, eq=False)
class _Request:
    columns: Mapping[str, Any]
    num_samples: int
    asked_s: float
    deadline_s: float
    answer: Future[Answer]


@dataclass(slots=True, eq=False)
class _Group:
    """Requests whose columns were read together, one after another."""

    requests: list[_Request]
    samples: Samples


class RunWatcher:
    """What a scorer tells of its work; this one hears nothing."""

    def run(self, version: ServedVersion, requests: Sequence[Samples], seconds: float) -> None:
        """Requests were answered together."""


class Scorer:
    """See the module.

    Args:
      most_waiting: samples in the queue; further requests are refused.
      clock: of the machine.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        most_waiting: int,
        watcher: RunWatcher | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._replica, self._most_waiting, self._clock_s = replica, most_waiting, clock.monotonic_s
        self._watcher = watcher or RunWatcher()
        self._waiting: deque[_Request] = deque()
        self._num_waiting = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._answer_all, name="scorer", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Samples in the queue."""
        return self._num_waiting

    @property
    def oldest_s(self) -> float:
        """Seconds that the first request in the queue has waited."""
        with self._changed:
            return self._clock_s() - self._waiting[0].asked_s if self._waiting else 0.0

    def submit(self, columns: Mapping[str, Any], *, num_samples: int, timeout_s: float) -> Future[Answer]:
        """Puts a request into the queue.

        Args:
          columns: as `LoadedModel.read` takes them, with context.
          num_samples: how many there seem to be.

        Returns:
          The answer; `ModelError` for columns that do not fit, `TooLate` after `timeout_s`.

        Raises:
          Busy: the queue is full.
        """
        now_s = self._clock_s()
        request = _Request(columns, num_samples, now_s, now_s + timeout_s, Future())
        with self._changed:
            if self._is_closed or (self._waiting and self._num_waiting + num_samples > self._most_waiting):
                raise Busy
            self._waiting.append(request)
            self._num_waiting += num_samples
            self._changed.notify()
        return request.answer

    def close(self) -> None:
        """Answers what waits, then ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _answer_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                version = self._replica.current
                taken = self._take(version.most_samples if version is not None else 1)
            try:
                self._answer(taken)
            except ShardAway as error:
                _logger.warning("%s", error)
                _refuse(taken, error)
            except BaseException as error:
                # Nobody would answer any more if this thread ended.
                _logger.exception("found an error that no request explains")
                _refuse(taken, error)

    def _take(self, most: int) -> list[_Request]:
        """The requests of one run of `most` samples, at least one."""
        taken: list[_Request] = []
        count = 0
        while self._waiting and (not taken or count + self._waiting[0].num_samples <= most):
            request = self._waiting.popleft()
            self._num_waiting -= request.num_samples
            count += request.num_samples
            taken.append(request)
        return taken

    def _answer(self, taken: Sequence[_Request]) -> None:
        with self._replica.use() as version:
            began_s = self._clock_s()
            turn: list[_Request] = []
            for request in taken:
                # A client that went away has cancelled its request.
                if not request.answer.set_running_or_notify_cancel():
                    continue
                if began_s > request.deadline_s:
                    request.answer.set_exception(TooLate())
                    continue
                turn.append(request)
            read = _read(version, turn)
            for together in _runs(read, version.most_samples):
                outputs = self._scored(version, [group.samples for group in together])
                for group, found in zip(together, outputs, strict=True):
                    start = 0
                    for request in group.requests:
                        stop = start + request.num_samples if len(group.requests) > 1 else None
                        answer = Answer(
                            outputs={name: values[start:stop] for name, values in found.items()},
                            version=version.name,
                            number=version.number,
                            waited_s=began_s - request.asked_s,
                        )
                        request.answer.set_result(answer)
                        start += request.num_samples
            if read:
                self._watcher.run(version, [group.samples for group in read], self._clock_s() - began_s)

    def _scored(self, version: ServedVersion, requests: Sequence[Samples]) -> list[dict[str, np.ndarray]]:
        if len(requests) > 1:
            return version.model.score(requests)
        return [version.model.score_whole(requests[0], version.most_samples)]


def _refuse(requests: Sequence[_Request], error: BaseException) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)


def _runs(groups: Sequence[_Group], most: int) -> list[list[_Group]]:
    """The same groups, each list of which is one run; a group that fits none is alone."""
    runs: list[list[_Group]] = []
    left, room = sum(group.samples.num_samples for group in groups), 0
    for group in groups:
        count = group.samples.num_samples
        if not runs or count > room:
            runs.append([])
            room = run_size(left, most)
        runs[-1].append(group)
        room -= count
        left -= count
    return runs


def _read(version: ServedVersion, requests: Sequence[_Request]) -> list[_Group]:
    """What the model reads of some requests. Errors are their answers.

    A column costs more to read than a few more samples of it. So requests of lists without a context are read as one,
    unless one of them is refused. What a value means must not depend on those of others beside it, so only columns of
    the same one type are joined.
    """
    if len(requests) < 2:
        return _read_alone(version, requests)
    model = version.model
    names = model.columns
    alike: list[_Request] = []
    kinds = None
    for request in requests:
        own = _kinds(request, names)
        if own is not None and kinds in (None, own):
            alike.append(request)
            kinds = own
    if len(alike) > 1:
        try:
            joined = {name: list(chain.from_iterable(one.columns[name] for one in alike)) for name in names}
            group = _Group(alike, model.read(joined))
        except ModelError:
            pass  # One of them is refused: each is read alone, so that the others are answered.
        else:
            rest = {id(one) for one in requests} - {id(one) for one in alike}
            return [group, *_read_alone(version, [one for one in requests if id(one) in rest])]
    return _read_alone(version, requests)


def _kinds(request: _Request, names: Sequence[str]) -> list[type] | None:
    """The type of the values of each column; None unless each has a list with a value for each sample, all of one type.
    Lists of lists are not looked into.
    """
    kinds: list[type] = []
    for name in names:
        values = request.columns.get(name)
        if type(values) is not list or len(values) != request.num_samples:
            return None
        types = set(map(type, values))
        if len(types) != 1 or types <= {list, type(None)}:
            return None
        kinds += types
    return kinds


def _read_alone(version: ServedVersion, requests: Sequence[_Request]) -> list[_Group]:
    groups = []
    for request in requests:
        try:
            groups.append(_Group([request], version.model.read(request.columns, with_context=True)))
        except Exception as error:
            request.answer.set_exception(error)
    return groups
