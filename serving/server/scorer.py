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
from typing import Any

import numpy as np

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.serving.artifact.exported_model import Samples
from podembed.serving.server.replica import Replica, ServedVersion
from podembed.serving.server.served_model import parts_of

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
                taken = self._take()
            try:
                self._answer(taken)
            except BaseException as error:
                # Nobody would answer any more if this thread ended.
                _logger.exception("found an error that no request explains")
                for request in taken:
                    if not request.answer.done():
                        request.answer.set_exception(error)

    def _take(self) -> list[_Request]:
        """The requests of one run, at least one."""
        taken: list[_Request] = []
        count = 0
        while self._waiting and (not taken or count + self._waiting[0].num_samples <= self._replica.most_samples):
            request = self._waiting.popleft()
            self._num_waiting -= request.num_samples
            count += request.num_samples
            taken.append(request)
        return taken

    def _answer(self, taken: Sequence[_Request]) -> None:
        with self._replica.use() as version:
            began_s = self._clock_s()
            read: list[tuple[_Request, Samples]] = []
            for request in taken:
                # A client that went away has cancelled its request.
                if not request.answer.set_running_or_notify_cancel():
                    continue
                if began_s > request.deadline_s:
                    request.answer.set_exception(TooLate())
                    continue
                try:
                    read.append((request, version.model.read(request.columns, with_context=True)))
                except Exception as error:
                    request.answer.set_exception(error)
            for together in self._runs(read):
                outputs = self._scored(version, [samples for _, samples in together])
                for (request, _), found in zip(together, outputs, strict=True):
                    answer = Answer(
                        outputs=found,
                        version=version.name,
                        number=version.number,
                        waited_s=began_s - request.asked_s,
                    )
                    request.answer.set_result(answer)
            if read:
                self._watcher.run(version, [samples for _, samples in read], self._clock_s() - began_s)

    def _runs(self, read: Sequence[tuple[_Request, Samples]]) -> list[list[tuple[_Request, Samples]]]:
        """The same requests, each list of which fits one run; a request that fits none is alone."""
        runs: list[list[tuple[_Request, Samples]]] = []
        count = 0
        for one in read:
            count += one[1].num_samples
            if not runs or count > self._replica.most_samples:
                runs.append([])
                count = one[1].num_samples
            runs[-1].append(one)
        return runs

    def _scored(self, version: ServedVersion, requests: Sequence[Samples]) -> list[dict[str, np.ndarray]]:
        if len(requests) > 1:
            return version.model.score(requests)
        parts = [version.model.score([part])[0] for part in parts_of(requests[0], self._replica.most_samples)]
        return [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}]
