"""`RayJobRunner` beside a cluster that is lost, comes back empty, knows jobs of others, or is told to stop one: with a
scripted client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from podembed.jobs.supervise import ray_jobs
from podembed.jobs.supervise.ray_jobs import LOST_EXIT_CODE, RayJobRunner
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import EXIT_STOPPED


@dataclass
class ScriptedCluster:
    """What Ray's client says, with its errors: jobs by submission id."""

    jobs: dict[str, SimpleNamespace] = field(default_factory=dict)
    is_away: bool = False
    loses_answers: bool = False
    stopped: list[str] = field(default_factory=list)

    def _found(self, name: str) -> SimpleNamespace:
        if self.is_away:
            raise ConnectionError("Failed to connect to Ray")
        if name not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {name} does not exist.")
        return self.jobs[name]

    def submit_job(self, *, submission_id: str, metadata: dict[str, str] | None = None, **_: Any) -> None:
        if self.is_away:
            raise ConnectionError("Failed to connect to Ray")
        if submission_id in self.jobs:
            raise RuntimeError(
                f"Request failed with status code 500: Job with submission_id {submission_id} already exists."
            )
        self.jobs[submission_id] = SimpleNamespace(
            status="RUNNING", driver_exit_code=None, metadata=metadata, message="", logs="trains\n"
        )
        if self.loses_answers:
            self.loses_answers = False
            raise ConnectionError("Connection reset by peer")

    def get_job_info(self, name: str) -> SimpleNamespace:
        return self._found(name)

    def get_job_logs(self, name: str) -> str:
        return self._found(name).logs

    def stop_job(self, name: str) -> None:
        self._found(name)
        self.stopped.append(name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    found = ScriptedCluster()
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: found)
    monkeypatch.setattr(ray_jobs, "POLL_S", 0.0)
    return found


def runner_of(notices: list[str] | None = None, *, patience_s: float = 600.0) -> RayJobRunner:
    notice: Callable[[str], None] = (lambda text: None) if notices is None else notices.append
    return RayJobRunner(address="http://head", working_dir=".", name="clicks", notice=notice, patience_s=patience_s)


def started(notices: list[str] | None = None) -> RayJobRunner:
    runner = runner_of(notices)
    runner.start(["train"], 1)
    assert runner.poll() is None
    return runner


def test_a_cluster_that_came_back_without_its_jobs_has_lost_the_attempt_and_gets_the_next(
    cluster: ScriptedCluster,
) -> None:
    notices: list[str] = []
    runner = started(notices)
    cluster.is_away = True
    assert runner.poll() is None
    assert "does not answer" in notices[-1]
    cluster.is_away, cluster.jobs = False, {}
    assert runner.poll() == LOST_EXIT_CODE
    assert "clicks-a1" in notices[-1]
    assert "started anew" in notices[-1]
    runner.start(["train", "--resume"], 2)
    assert runner.poll() is None
    assert list(cluster.jobs) == ["clicks-a2"]


def test_an_attempt_begins_when_the_cluster_is_back_or_not_at_all(cluster: ScriptedCluster) -> None:
    cluster.is_away = True
    runner = runner_of()
    runner.start(["train"], 1)
    assert runner.poll() is None
    cluster.is_away = False
    assert runner.poll() is None
    assert list(cluster.jobs) == ["clicks-a1"]

    cluster.is_away = True
    impatient = runner_of(patience_s=-1.0)
    impatient.start(["train"], 1)
    with pytest.raises(ConfigurationError, match="did not answer"):
        impatient.poll()


@pytest.mark.parametrize("answer", ["404: 404 page not found", "429: too many requests", "503: no healthy upstream"])
def test_what_a_proxy_says_while_the_cluster_comes_up_is_no_answer(
    answer: str, cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = started()

    def refuse(name: str) -> None:
        raise RuntimeError(f"Request failed with status code {answer}.")

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "get_job_info", refuse)
        assert runner.poll() is None
    cluster.jobs["clicks-a1"].status = "SUCCEEDED"
    assert runner.poll() == 0


def test_a_supervisor_that_waits_for_a_cluster_can_be_stopped(cluster: ScriptedCluster) -> None:
    cluster.is_away = True
    runner = runner_of()
    runner.start(["train"], 1)
    assert runner.poll() is None
    runner.stop()
    assert runner.poll() == EXIT_STOPPED


def test_a_job_of_an_earlier_supervisor_is_not_taken_for_ours(cluster: ScriptedCluster) -> None:
    first = started()
    cluster.jobs["clicks-a1"].status = "SUCCEEDED"
    assert first.poll() == 0
    second = started()
    assert list(cluster.jobs) == ["clicks-a1", "clicks-a2"]
    assert second.poll() is None
    second.start(["train", "--resume"], 2)
    assert second.poll() is None
    assert list(cluster.jobs) == ["clicks-a1", "clicks-a2", "clicks-a3"]


def test_a_submission_whose_answer_was_lost_is_found_again(cluster: ScriptedCluster) -> None:
    cluster.loses_answers = True
    runner = runner_of()
    runner.start(["train"], 1)
    assert [runner.poll(), runner.poll()] == [None, None]
    assert list(cluster.jobs) == ["clicks-a1"]


def test_a_request_to_stop_reaches_a_cluster_that_did_not_answer_at_first(cluster: ScriptedCluster) -> None:
    runner = started()
    cluster.is_away = True
    runner.stop()
    assert (runner.poll(), cluster.stopped) == (None, [])
    cluster.is_away = False
    assert [runner.poll(), runner.poll()] == [None, None]
    assert cluster.stopped == ["clicks-a1"]


def test_a_job_whose_submission_was_not_answered_is_stopped_with_its_supervisor(cluster: ScriptedCluster) -> None:
    cluster.loses_answers = True
    runner = runner_of()
    runner.start(["train"], 1)
    assert runner.poll() is None
    runner.stop()
    assert runner.poll() is None
    assert cluster.stopped == ["clicks-a1"]
    cluster.jobs["clicks-a1"].status = "STOPPED"
    assert runner.poll() == LOST_EXIT_CODE


def test_an_attempt_that_never_began_is_no_reason_to_stop_a_job_of_the_same_name(cluster: ScriptedCluster) -> None:
    started()
    cluster.is_away = True
    other = runner_of()
    other.start(["train"], 1)
    assert other.poll() is None
    cluster.is_away = False
    other.kill()
    assert cluster.stopped == []
    assert other.poll() is None
    assert list(cluster.jobs) == ["clicks-a1", "clicks-a2"]
    assert [other.poll(), cluster.stopped] == [None, []], "the attempt was killed before it began"
    other.stop()
    assert cluster.stopped == ["clicks-a2"]


def test_the_heartbeat_of_a_job_of_the_same_name_is_not_ours(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = SimpleNamespace(submission="clicks-a1")
    monkeypatch.setattr(ray_jobs, "heartbeat_of", lambda url, is_ours: holder if is_ours(holder) else None)
    runner = started()
    other = runner_of()
    other.start(["train"], 1)
    assert other.look("folder").heartbeat is None
    assert runner.look("folder").heartbeat is holder


def test_who_asks_twice_does_not_wait_for_a_cluster_that_is_gone(cluster: ScriptedCluster) -> None:
    runner = started()
    cluster.is_away = True
    runner.stop()
    runner.stop()
    assert runner.poll() == LOST_EXIT_CODE


@pytest.mark.parametrize(
    ("logs", "code"),
    [("\nstopped by SIGTERM at step 40 of 100\n  trained 3 samples\n", EXIT_STOPPED), ("step 40\n", LOST_EXIT_CODE)],
)
def test_a_stopped_job_has_the_code_of_its_driver_though_ray_forgets_it(
    logs: str, code: int, cluster: ScriptedCluster
) -> None:
    runner = started()
    runner.stop()
    cluster.jobs["clicks-a1"].status, cluster.jobs["clicks-a1"].logs = "STOPPED", logs
    assert runner.poll() == code
    assert not runner.was_stopped_by_others


def test_a_job_that_somebody_stopped_through_ray_is_told_from_one_that_was_frozen(cluster: ScriptedCluster) -> None:
    runner = started()
    cluster.jobs["clicks-a1"].status = "STOPPED"
    runner.poll()
    assert runner.was_stopped_by_others
    runner.start(["train"], 2)
    runner.poll()
    runner.kill()
    cluster.jobs["clicks-a2"].status = "STOPPED"
    assert runner.poll() == LOST_EXIT_CODE
    assert not runner.was_stopped_by_others


def test_no_cluster_is_said_at_once() -> None:
    """By Ray's own client."""
    with pytest.raises(ConfigurationError, match="Found no Ray cluster at http://127.0.0.1:1"):
        RayJobRunner(address="http://127.0.0.1:1", working_dir=".", name="train", notice=lambda text: None)
