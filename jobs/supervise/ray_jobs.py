"""Attempts of `supervise` as Ray jobs: one submission each, followed to its end, on a cluster that may be gone for a
while.
"""

from __future__ import annotations

import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from podembed.jobs.supervise.driver_pulse import DriverSigns, heartbeat_of
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import EXIT_STOPPED
from podembed.orchestrator.commit.holder import Holder

# Ray kills a stopped job's driver 3 s after SIGTERM unless told otherwise; a window and a commit take longer.
GRACE_S = 120
POLL_S = 2.0
LOST_EXIT_CODE = 255  # the job failed, and its own exit code is unknown
TAIL_LENGTH = 4096  # characters of a job's output, in which its summary is looked for
_SUPERVISOR = "podembed_supervisor"  # in the metadata of a job: whose it is
# Of a proxy before a cluster that comes up, too: it knows no such page, is slow, or wants fewer requests.
_PASSES = re.compile(r"status code (5\d\d|404|408|429)\b")
_LEFT_IN_ORDER = re.compile(r"^stopped by SIG[A-Z]+ at step \d+ of \d+$", re.MULTILINE)


class RayJobRunner:
    """Submits `python -m podembed ARGUMENTS` to a cluster.

    Args:
      address: address of the cluster's dashboard, `http://host:8265`.
      working_dir: folder that Ray copies to the cluster.
      name: submissions are called `NAME-a1`, `NAME-a2` and so on; numbers that the cluster knows from other supervisors
        are left out.
      notice: callback that is told about a cluster that does not answer.
      patience_s: how long it may not answer before the attempt counts as lost.

    Attributes:
      was_stopped_by_others: whether Ray stopped the attempt at the request of another program or person.

    Raises:
      ConfigurationError: no cluster answers there.
    """

    def __init__(
        self,
        *,
        address: str,
        working_dir: str,
        name: str,
        notice: Callable[[str], None],
        patience_s: float = 600.0,
    ) -> None:
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        try:
            self._client = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"Found no Ray cluster at {address} ({_first_line(error)}). Expected the address of its dashboard, "
                "such as http://head:8265."
            ) from error
        except AuthenticationError as error:
            raise ConfigurationError(
                f"The Ray cluster at {address} refused this program ({_first_line(error)}). Expected the cluster's "
                "token. Set RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as the cluster has it."
            ) from error
        self._working_dir = working_dir
        self._name = name
        self._notice = notice
        self._patience_s = patience_s
        self._supervisor = secrets.token_hex(8)
        self._entrypoint = ""
        self._number = 0
        self._answered_s = time.monotonic()
        self._asked_s = 0.0
        self._printed = 0
        self._tail = ""
        self._num_stops = 0
        self._is_submitted = self._is_told = self._is_killed = False
        self._is_silent = False
        self.was_stopped_by_others = False

    def start(self, arguments: Sequence[str], attempt: int) -> None:
        self._entrypoint = f"python -m podembed {shlex.join(arguments)}"
        self._number, self._printed, self._tail = max(attempt, self._number + 1), 0, ""
        self._is_submitted = self._is_told = self._is_killed = self.was_stopped_by_others = False
        self._answered_s = time.monotonic()

    def poll(self) -> int | None:
        now = time.monotonic()
        if now - self._asked_s < POLL_S:
            return None
        self._asked_s = now
        if not self._is_submitted:
            return self._submit(now)
        self._pass_on_stop()
        details = self._asked(lambda: self._client.get_job_info(self._submission))
        if details is _NO_ANSWER:
            is_lost = self._num_stops > 1 or now - self._answered_s > self._patience_s
            return LOST_EXIT_CODE if is_lost else None
        if details is _NOT_FOUND:
            self._notice(
                f"the Ray cluster does not know {self._submission} any more: it was started anew, and the job went "
                "with the old one"
            )
            return LOST_EXIT_CODE
        self._print_new()
        match str(details.status):
            case "SUCCEEDED":
                return 0
            case "STOPPED":
                # Ray forgets the exit code of a driver that it stops on request.
                self.was_stopped_by_others = not self._is_told
                return EXIT_STOPPED if _LEFT_IN_ORDER.search(self._tail) else LOST_EXIT_CODE
            case "FAILED":
                code = details.driver_exit_code
                if code is None:
                    self._notice(f"{self._submission}: {details.message}")
                return LOST_EXIT_CODE if code is None else code
        return None

    def stop(self) -> None:
        self._num_stops += 1
        if self._is_submitted:
            self._pass_on_stop()

    def kill(self) -> None:
        """As `stop`: Ray kills what has not gone when the time it gives is over."""
        if self._is_submitted:
            self._is_killed, self._is_told = True, False
            self._pass_on_stop()

    @property
    def _submission(self) -> str:
        return f"{self._name}-a{self._number}"

    def _submit(self, now: float) -> int | None:
        """Submits the attempt. A cluster that vanished takes its time to come back; the attempt begins when it is
        there.

        Raises:
          ConfigurationError: it was not back in time.
        """
        if self._num_stops:
            # A request whose answer was lost may have been heard.
            details = self._asked(lambda: self._client.get_job_info(self._submission))
            if details is _NO_ANSWER or _supervisor_of(details) != self._supervisor:
                return EXIT_STOPPED
            self._is_submitted = True
            self._pass_on_stop()
            return None
        environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S)}, "working_dir": self._working_dir}
        while True:
            answer = self._asked(
                lambda: self._client.submit_job(
                    entrypoint=self._entrypoint,
                    submission_id=self._submission,
                    runtime_env=environment,
                    metadata={_SUPERVISOR: self._supervisor},
                )
            )
            if answer is _EXISTS:
                # Submitted by a request whose answer was lost; or by another supervisor, whose job is none of ours.
                details = self._asked(lambda: self._client.get_job_info(self._submission))
                if details is not _NO_ANSWER and _supervisor_of(details) != self._supervisor:
                    self._number += 1
                    continue
                answer = details
            break
        if answer is not _NO_ANSWER:
            self._is_submitted = True
            self._notice(f"submitted {self._submission}: {self._entrypoint}")
        elif now - self._answered_s > self._patience_s:
            raise ConfigurationError(
                f"The Ray cluster did not answer for {self._patience_s:.0f} s. Expected it back by now. Start it and "
                "supervise again."
            )
        return None

    def _pass_on_stop(self) -> None:
        """Asks Ray to stop the job, until it has heard it."""
        if (self._num_stops or self._is_killed) and not self._is_told:
            self._is_told = self._asked(lambda: self._client.stop_job(self._submission)) is not _NO_ANSWER

    def look(self, url: str) -> DriverSigns:
        def is_ours(holder: Holder) -> bool:
            # Until the cluster has taken it, the name may be that of another supervisor's job.
            return self._is_submitted and holder.submission == self._submission

        return DriverSigns(heartbeat=heartbeat_of(url, is_ours), statistics=None)

    def _print_new(self) -> None:
        """What the job has printed since the last look."""
        logs = self._asked(lambda: self._client.get_job_logs(self._submission))
        if isinstance(logs, str):
            sys.stdout.write(logs[self._printed :])
            sys.stdout.flush()
            self._printed, self._tail = len(logs), logs[-TAIL_LENGTH:]

    def _asked(self, question: Callable[[], Any]) -> Any:
        """The answer; `_NO_ANSWER` from a cluster that cannot be reached, `_EXISTS` where a job has that name,
        `_NOT_FOUND` where none has.
        """
        try:
            answer = question()
        except (ConnectionError, OSError, RuntimeError) as error:
            answer = _meaning(error)
            if answer is None:
                raise
            if answer is _NO_ANSWER:
                if not self._is_silent:
                    self._notice(
                        f"the Ray cluster does not answer; it is waited for, up to {self._patience_s:.0f} s: "
                        f"{_first_line(error)}"
                    )
                self._is_silent = True
                return answer
        self._answered_s, self._is_silent = time.monotonic(), False
        return answer


_NO_ANSWER, _EXISTS, _NOT_FOUND = object(), object(), object()


def _meaning(error: Exception) -> object | None:
    """What Ray says with an error: its client has one type for all, with the text of the answer; None for anything
    else.
    """
    said = str(error)
    if not isinstance(error, RuntimeError):
        return _NO_ANSWER
    if "already exists" in said:
        return _EXISTS
    if "status code 404" in said and "does not exist" in said:
        return _NOT_FOUND
    return _NO_ANSWER if _PASSES.search(said) else None


def _supervisor_of(details: Any) -> str | None:
    """Who submitted a job."""
    return None if details is _NOT_FOUND else (details.metadata or {}).get(_SUPERVISOR)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
