"""Attempts of `supervise` as Ray jobs: one submission each, followed to its end, on a cluster that may be gone for a while."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.config import ConfigurationError
from orchestrator.driver_pulse import Look, heartbeat_of

# Ray kills a stopped job's driver 3 s after SIGTERM unless told otherwise; a window and a commit take longer.
GRACE_S = 120
POLL_S = 2.0
LOST_EXIT_CODE = 255  # the job failed and nobody knows how


class RayJobRunner:
    """Submits `python -m jobs.cli ARGUMENTS` to a cluster.

    Args:
      address: of the cluster's dashboard, `http://host:8265`.
      working_dir: folder that Ray copies to the cluster.
      name: submissions are called `NAME-a1`, `NAME-a2` and so on.
      notice: told about a cluster that does not answer.
      patience_s: how long it may not answer before the attempt counts as lost.

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
                f"Found no Ray cluster at {address} ({_first_line(error)}). Expected the address of its dashboard, such as http://head:8265."
            ) from error
        except AuthenticationError as error:
            raise ConfigurationError(
                f"The Ray cluster at {address} refused this program ({_first_line(error)}). Expected the cluster's token. "
                "Set RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as the cluster has it."
            ) from error
        self._working_dir = working_dir
        self._name = name
        self._notice = notice
        self._patience_s = patience_s
        self._submission = ""
        self._answered_s = time.monotonic()
        self._asked_s = 0.0
        self._printed = 0
        self._is_silent = False

    def start(self, arguments: Sequence[str], attempt: int) -> None:
        self._submission, self._printed = f"{self._name}-a{attempt}", 0
        self._answered_s = time.monotonic()
        environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S)}, "working_dir": self._working_dir}
        entrypoint = f"python -m jobs.cli {shlex.join(arguments)}"

        def submit() -> None:
            self._client.submit_job(entrypoint=entrypoint, submission_id=self._submission, runtime_env=environment)

        # A cluster that vanished takes its time to come back; an attempt begins when it is there.
        while self._asked(submit) is _NO_ANSWER:
            if time.monotonic() - self._answered_s > self._patience_s:
                raise ConfigurationError(
                    f"The Ray cluster did not answer for {self._patience_s:.0f} s. Expected it back by now. Start it and supervise again."
                )
            time.sleep(POLL_S)
        self._notice(f"submitted {self._submission}: {entrypoint}")

    def poll(self) -> int | None:
        now = time.monotonic()
        if now - self._asked_s < POLL_S:
            return None
        self._asked_s = now
        details = self._asked(lambda: self._client.get_job_info(self._submission))
        if details is _NO_ANSWER:
            return LOST_EXIT_CODE if now - self._answered_s > self._patience_s else None
        self._print_new()
        match str(details.status):
            case "SUCCEEDED":
                return 0
            case "FAILED" | "STOPPED":
                code = details.driver_exit_code
                if code is None:
                    self._notice(f"{self._submission}: {details.message}")
                return LOST_EXIT_CODE if code is None else code
        return None

    def stop(self) -> None:
        self._asked(lambda: self._client.stop_job(self._submission))

    def kill(self) -> None:
        """As `stop`: Ray kills what has not gone when the time it gives is over."""
        self.stop()

    def look(self, url: str) -> Look:
        return Look(heartbeat=heartbeat_of(url, lambda holder: holder.submission == self._submission), signs=None)

    def _print_new(self) -> None:
        """What the job has printed since the last look."""
        logs = self._asked(lambda: self._client.get_job_logs(self._submission))
        if isinstance(logs, str):
            sys.stdout.write(logs[self._printed :])
            sys.stdout.flush()
            self._printed = len(logs)

    def _asked(self, question: Callable[[], Any]) -> Any:
        """The answer, or `_NO_ANSWER` from a cluster that cannot be reached."""
        try:
            answer = question()
        except (ConnectionError, OSError, RuntimeError) as error:
            if "already exists" in str(error):
                # Submitted by a request whose answer was lost.
                return None
            if isinstance(error, RuntimeError) and "status code 5" not in str(error):
                raise
            if not self._is_silent:
                self._notice(f"the Ray cluster does not answer: {_first_line(error)}")
            self._is_silent = True
            return _NO_ANSWER
        self._answered_s, self._is_silent = time.monotonic(), False
        return answer


_NO_ANSWER = object()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
