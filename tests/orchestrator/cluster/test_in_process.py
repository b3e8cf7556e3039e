"""Whole runs in this process, without Ray: train, evaluate, stop and go on, fail; and no thread, file or lease stays
behind.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podembed.jobs.fitting import fit
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import (
    CheckpointConfig,
    ConfigurationError,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from podembed.orchestrator.api.result import SHORT_S, SHORT_WINDOWS, Recovery, Result
from podembed.orchestrator.api.run_errors import JobFailed
from podembed.orchestrator.api.signals import StopSignals
from podembed.orchestrator.cluster.in_process import InProcessBackend
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.holder import read_heartbeat
from podembed.orchestrator.commit.lease_files import read_claims
from podembed.orchestrator.driver.driver import Driver
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import Reporter, SilentReporter
from podembed.orchestrator.group.survivors import Groups
from podembed.orchestrator.group.worker_group import HostHandles
from podembed.orchestrator.run.finished import finished
from podembed.orchestrator.run.history_record import read_history
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.workers.data.input_errors import InputError
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.storage_errors import StoreUnavailable
from podembed.workers.storage.store import Store
from tests.long_tests import long_case
from tests.orchestrator.run.claims_of import claims_of
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import small_job
from tests.training import fit_job

STEPS = 24


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    threads = {thread.name for thread in threading.enumerate()}
    yield
    left = [
        t.name for t in threading.enumerate() if t.name.startswith(("host", "device", "read")) and t.name not in threads
    ]
    assert left == []
    assert f"@podembed-{os.getpid()}-" not in Path("/proc/net/unix").read_text()


class Stopper(SilentReporter):
    """Asks for a stop once a step is reached, as a signal would."""

    def __init__(self, stop: StopSignals, at: int) -> None:
        self.stop, self.at = stop, at

    def window(self, report: WindowReport) -> None:
        if report.step >= self.at:
            self.stop.request("a test")


def train(
    folder: str,
    path: Path | str,
    *,
    stop_at: int | None = None,
    evaluate: bool = False,
    reporter: Reporter | None = None,
    **config: object,
) -> Result:
    reference = JobReference(
        function="tests.small_job:small_job", arguments={"folder": folder, "evaluate": evaluate, "audit": False}
    )
    run = create_run(str(path), reference.resolve(), reference)
    stop = StopSignals()
    settings = {"max_steps": STEPS, "checkpoint_config": CheckpointConfig(every_steps=10)} | config
    driver = Driver(
        run,
        scaling=ScalingConfig(in_process=True),
        config=RunConfig(**settings),  # type: ignore[arg-type]
        backend=InProcessBackend(),
        reporter=reporter or (SilentReporter() if stop_at is None else Stopper(stop, stop_at)),
        stop=stop,
    )
    return driver.run()


@pytest.fixture(scope="module")
def whole(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(small_data, tmp_path_factory.mktemp("whole") / "run")


def test_a_run_trains_commits_and_evaluates(small_data: str, tmp_path: Path) -> None:
    result = train(small_data, tmp_path / "a run", evaluate=True, eval_every_steps=9)
    assert (result.step, result.total_steps, result.stopped_by) == (STEPS, STEPS, None)
    assert sorted(result.losses) == list(range(STEPS))
    assert np.isfinite(list(result.losses.values())).all()
    assert [evaluation.step for evaluation in result.evaluations] == [9, 18, 24]
    assert {evaluation.num_samples for evaluation in result.evaluations} == {1_900}
    assert all(0.3 < evaluation.auc < 1.0 for evaluation in result.evaluations)
    assert result.commit == "s000000024-g00000001"
    assert result.recoveries == ()
    assert result.num_samples == sum(window * 96 for window in [STEPS]) - (20 * 96 - 1_900)
    assert result.samples_per_s == pytest.approx(result.num_samples / result.trained_s)
    # Whatever the time that it took here.
    assert replace(result, trained_s=SHORT_S / 2).is_short
    assert not replace(result, trained_s=SHORT_S, num_windows=SHORT_WINDOWS).is_short
    store = Store(result.path)
    assert read_heartbeat(store, 1) is None, "the lease was not released"


def test_evaluations_change_no_byte(whole: Result, small_data: str, tmp_path: Path) -> None:
    result = train(small_data, tmp_path / "run", evaluate=True, eval_every_steps=5)
    assert_same_bytes(committed_state(result.path), committed_state(whole.path))


def test_commits_that_follow_the_clock_change_no_byte(whole: Result, small_data: str, tmp_path: Path) -> None:
    """The clock of the machine decides how many there are; where each was made is in its name."""
    config = CheckpointConfig(every_seconds=1e-6, num_to_keep=None, read_back=True)
    result = train(small_data, tmp_path / "run", checkpoint_config=config)
    steps = [commit.step for commit in checkpoint.list_commits(Store(result.path))]
    assert len(steps) >= 2
    assert steps[0] == STEPS
    assert_same_bytes(committed_state(result.path), committed_state(whole.path))


def test_the_best_commits_stay_over_several_starts(small_data: str, tmp_path: Path) -> None:
    config = CheckpointConfig(on_best=True, num_to_keep=2, keep_best=1)
    evaluations: dict[int, float] = {}
    for last in (12, STEPS):
        result = train(
            small_data, tmp_path / "run", evaluate=True, eval_every_steps=3, max_steps=last, checkpoint_config=config
        )
        evaluations |= {evaluation.step: evaluation.auc for evaluation in result.evaluations if evaluation.step < last}
    commits = [commit.manifest for commit in checkpoint.list_commits(Store(result.path))]
    steps = [manifest.step for manifest in commits if manifest]
    best = max(evaluations, key=lambda step: evaluations[step])
    assert best in steps
    assert len(steps) <= 3
    assert {manifest.step: manifest.metrics["auc"] for manifest in commits if manifest and manifest.metrics} == {
        step: evaluations[step] for step in steps if step in evaluations
    }


def test_training_goes_on_while_heartbeats_cannot_be_written(
    whole: Result, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage that is over before the next commit costs nothing but a line."""
    calls: list[str] = []

    def refuse(self: Store, name: str, data: bytes) -> None:
        calls.append(name)
        raise StoreUnavailable(f"replace '{name}'", attempts=1, elapsed_s=0.0, last=ConnectionError("away"))

    class Outage(SilentReporter):
        """From the first window on; the claim of the run was still possible."""

        notices: list[str] = []  # noqa: RUF012

        def window(self, report: WindowReport) -> None:
            monkeypatch.setattr(Store, "replace", refuse)

        def notice(self, text: str) -> None:
            self.notices.append(text)

    monkeypatch.setattr("podembed.orchestrator.driver.generation.HEARTBEAT_S", 0.0)
    monkeypatch.setattr("podembed.orchestrator.commit.lease.HEARTBEAT_EVERY_S", 0.0)
    job = small_job(folder=small_data, audit=False)
    result = Driver(
        create_run(str(tmp_path / "run"), job, None),
        scaling=ScalingConfig(in_process=True),
        config=RunConfig(max_steps=STEPS, checkpoint_config=CheckpointConfig(every_steps=10)),
        backend=InProcessBackend(),
        reporter=Outage(),
        stop=StopSignals(),
    ).run()
    assert calls
    assert any("the heartbeat was not written" in notice for notice in Outage.notices)
    assert_same_bytes(committed_state(result.path), committed_state(whole.path))


def test_storage_that_does_not_delete_is_no_reason_to_stop(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Store, name: str) -> None:
        raise PermissionError(13, "may not delete", name)

    class Listener(SilentReporter):
        notices: list[str] = []  # noqa: RUF012

        def notice(self, text: str) -> None:
            self.notices.append(text)

    job = small_job(folder=small_data, audit=False)
    run = create_run(str(tmp_path / "run"), job, None)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "delete", refuse)
        Driver(
            run,
            scaling=ScalingConfig(in_process=True),
            config=RunConfig(max_steps=16, checkpoint_config=CheckpointConfig(every_steps=4, num_to_keep=2)),
            backend=InProcessBackend(),
            reporter=Listener(),
            stop=StopSignals(),
        ).run()
    commits = checkpoint.list_commits(run.store)
    assert [commit.step for commit in commits if commit.counts] == [16, 12, 8, 4]
    assert sum("old commits were not deleted: " in notice for notice in Listener.notices) == 2


def test_hosts_that_live_on_hear_of_their_driver_with_each_heartbeat(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the storage is away: they see no heartbeat then, and it may be back for them earlier than for the
    driver.
    """
    greeted: list[bool] = []

    def refuse(self: Store, name: str, data: bytes) -> None:
        raise StoreUnavailable(f"replace '{name}'", attempts=1, elapsed_s=0.0, last=ConnectionError("away"))

    monkeypatch.setattr("podembed.orchestrator.driver.generation.HEARTBEAT_S", 0.0)
    monkeypatch.setattr("podembed.orchestrator.commit.lease.HEARTBEAT_EVERY_S", 0.0)
    monkeypatch.setattr(Groups, "ping_survivors", lambda self, all_workers=False: greeted.append(all_workers))
    run = create_run(str(tmp_path / "run"), small_job(folder=small_data, audit=False), None)
    monkeypatch.setattr(Store, "replace", refuse)
    Driver(
        run,
        scaling=ScalingConfig(in_process=True),
        config=RunConfig(max_steps=2),
        backend=InProcessBackend(),
        reporter=SilentReporter(),
        stop=StopSignals(),
    ).run()
    assert {*greeted} == {True, False}, "and all workers, which see no heartbeat, where it cannot be written"


def test_a_stop_commits_and_a_later_start_ends_with_the_same_bytes(
    whole: Result, small_data: str, tmp_path: Path
) -> None:
    stopped = train(small_data, tmp_path / "run", stop_at=13)
    assert stopped.stopped_by == "a test"
    assert 13 <= stopped.step < STEPS
    assert stopped.commit is not None
    assert stopped.commit.startswith(f"s{stopped.step:09d}-")
    result = train(small_data, tmp_path / "run")
    assert (result.step, result.stopped_by) == (STEPS, None)
    assert sorted(result.losses) == list(range(stopped.step, STEPS))
    losses = {**stopped.losses, **result.losses}
    assert losses == dict(whole.losses)
    assert_same_bytes(committed_state(result.path), committed_state(whole.path))
    assert stopped.num_samples + result.num_samples == whole.num_samples


class Starting(SilentReporter):
    """Sends this process a SIGTERM when something is said for the first time."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.is_sent = False

    def activity(self, text: str) -> None:
        if self.words in text and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    notice = activity

    def recovery(self, recovery: Recovery) -> None:
        self.activity("recovered")


def test_a_stop_asked_before_the_first_step_trains_nothing_and_a_later_start_all(
    whole: Result, small_data: str, tmp_path: Path
) -> None:
    trainer = Trainer(
        JobReference(function="tests.small_job:small_job", arguments={"folder": small_data, "audit": False}),
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(
            name="run",
            storage_path=str(tmp_path),
            max_steps=STEPS,
            checkpoint_config=CheckpointConfig(every_steps=10),
        ),
        reporter=Starting("starting the processes"),  # pyright: ignore
    )
    result = trainer.fit()
    assert (result.step, result.commit, result.stopped_by) == (0, None, "SIGTERM")
    assert (result.losses, result.num_windows) == ({}, 0)
    again = trainer.fit()
    assert (again.step, again.stopped_by) == (STEPS, None)
    assert_same_bytes(committed_state(again.path), committed_state(whole.path))


class AfterFault(Starting):
    """Counts from the fault on. Mutable: `said`, all of it."""

    said = ""
    has_failed = False

    def activity(self, text: str) -> None:
        self.said += f"{text}\n"
        self.has_failed = self.has_failed or "device 0 failed" in text
        if self.has_failed:
            super().activity(text)

    notice = activity


@pytest.mark.parametrize("moment", ["device 0 failed", *map(long_case, ["starting the processes", "recovered"])])
def test_a_stop_between_a_fault_and_the_next_step_names_the_commit_that_stands(
    moment: str, small_data: str, tmp_path: Path
) -> None:
    result = fit_broken("later", small_data, tmp_path, max_user_errors=1, reporter=AfterFault(moment))  # pyright: ignore
    assert (result.step, result.commit, result.stopped_by) == (10, "s000000010-g00000001", "SIGTERM")
    assert sorted(result.losses) == list(range(10))


def test_a_stop_in_the_middle_of_a_recovery_says_how_many_steps_it_gives_up(small_data: str, tmp_path: Path) -> None:
    reporter = AfterFault("starting the processes")
    result = fit_broken("later", small_data, tmp_path, commit_every=1000, max_user_errors=1, reporter=reporter)  # pyright: ignore
    assert (result.step, result.commit, result.stopped_by) == (0, None, "SIGTERM")
    assert re.search(r"recovery: 1\d steps after step 0 are given up\. .* from the first step", reporter.said)


def test_a_stop_while_the_cluster_is_awaited_names_the_commit_that_stands(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = train(small_data, tmp_path / "run", stop_at=5)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = fit(
        open_run(str(tmp_path / "run")),
        scaling=ScalingConfig(num_hosts=1),
        config=RunConfig(max_steps=STEPS),
        reporter=Starting("waiting for the Ray cluster"),  # pyright: ignore
    )
    assert (result.step, result.commit, result.stopped_by) == (before.step, before.commit, "SIGTERM")
    assert result.num_windows == 0


def test_a_finished_run_started_again_does_nothing_but_says_where_it_stands(whole: Result, small_data: str) -> None:
    before = committed_state(whole.path)
    again = train(small_data, Path(whole.path))
    assert (again.step, again.losses, again.commit) == (STEPS, {}, whole.commit)
    assert_same_bytes(committed_state(whole.path), before)


def fit_broken(
    model: str,
    folder: str,
    tmp_path: Path,
    *,
    commit_every: int = 5,
    max_user_errors: int = 0,
    reporter: Reporter | None = None,
) -> Result:
    return fit_job(
        JobReference(function="tests.faults.broken_jobs:broken_job", arguments={"folder": folder, "model": model}),
        tmp_path,
        name="broken",
        checkpoint_config=CheckpointConfig(every_steps=commit_every),
        failure_config=FailureConfig(max_user_errors=max_user_errors),
        reporter=reporter,
    )


@pytest.mark.parametrize(
    ("model", "words", "line"),
    [
        ("init", "RuntimeError: the user's init is wrong", 'raise RuntimeError("the user\'s init is wrong")'),
        ("trace", 'KeyError: "the user\'s model is wrong"', 'raise KeyError("the user\'s model is wrong")'),
        ("later", "ValueError: the user's callback is wrong", "in count"),
    ],
)
def test_an_error_of_the_users_model_ends_the_run_with_its_traceback(
    model: str, words: str, line: str, small_data: str, tmp_path: Path
) -> None:
    with pytest.raises(JobFailed) as caught:
        fit_broken(model, small_data, tmp_path)
    text = str(caught.value)
    assert text.startswith("device 0 failed: ")
    assert words in text
    assert line in text
    assert "broken_jobs.py" in text


def test_the_same_exception_at_the_same_step_twice_ends_the_run_which_says_so(small_data: str, tmp_path: Path) -> None:
    """It comes in the eleventh step of each process, and without a commit in between that is the same step."""
    with pytest.raises(JobFailed) as caught:
        fit_broken("later", small_data, tmp_path, commit_every=50, max_user_errors=5)
    text = str(caught.value)
    assert "\nIt came twice at step 10, so it would come again.\n" in text
    assert "in count" in text
    assert read_claims(Store(str(tmp_path / "broken")))[-1] == 2


def test_a_stop_while_the_storage_is_waited_for_is_a_stop_and_no_error(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of the storage a supervisor would not begin again, and the machine of this driver may just be
    preempted.
    """
    create = Store.create_exclusive

    def refuse(self: Store, name: str, data: bytes) -> bool:
        if name == "lease/g00000002.claim":
            raise StoreUnavailable(f"create '{name}'", attempts=1, elapsed_s=0.0, last=ConnectionError("away"))
        return create(self, name, data)

    class Preempted(SilentReporter):
        def notice(self, text: str) -> None:
            if "it is asked again" in text:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Store, "create_exclusive", refuse)
    result = fit_broken("later", small_data, tmp_path, max_user_errors=1, reporter=Preempted())
    assert (result.step, result.commit, result.stopped_by) == (10, "s000000010-g00000001", "SIGTERM")
    assert sorted(result.losses) == list(range(10))


def test_after_a_failure_the_run_is_free_and_its_commits_stand(small_data: str, tmp_path: Path) -> None:
    """A failed run may be opened at once from the same process, as in a notebook: nobody holds it any more."""
    with pytest.raises(JobFailed):
        fit_broken("later", small_data, tmp_path)
    run = open_run(str(tmp_path / "broken"))
    claims = claims_of(run)
    lease = claims.acquire()
    assert lease.generation == read_claims(run.store)[-1] == 2
    base = claims.load_base(lease)
    assert base is not None
    assert base.step == 10


def test_data_that_breaks_while_training_is_named(small_data: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    # Other tests write data of their own into folders beside these files.
    for path in Path(small_data).glob("*.parquet"):
        (folder / path.name).write_bytes(path.read_bytes())
    job = small_job(folder=str(folder), audit=False)
    run = create_run(str(tmp_path / "run"), job, None)
    victim = folder / "part-0.parquet"
    content = bytearray(victim.read_bytes())
    content[200:4000] = bytes(3800)
    victim.write_bytes(content)
    driver = Driver(
        run,
        scaling=ScalingConfig(in_process=True),
        config=RunConfig(),
        backend=InProcessBackend(),
        reporter=SilentReporter(),
        stop=StopSignals(),
    )
    with pytest.raises(InputError, match=r"host 0 failed: InputError: .*part-0\.parquet"):
        driver.run()


def test_more_hosts_than_lanes_are_refused_before_anything_is_made(small_data: str, tmp_path: Path) -> None:
    trainer = Trainer(
        small_job(folder=small_data),
        scaling_config=ScalingConfig(num_hosts=13),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        reporter=SilentReporter(),
    )
    with pytest.raises(ConfigurationError, match=r"13 hosts for the 12 lanes .*num_lanes=\.\.\.\) of at least 13"):
        trainer.fit()
    assert list(tmp_path.iterdir()) == []

    trainer = Trainer(
        small_job(folder=small_data),
        scaling_config=ScalingConfig(num_hosts=(2, 13)),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        reporter=SilentReporter(),
    )
    with pytest.raises(ConfigurationError, match="Found up to 13 hosts for the 12 lanes"):
        trainer.fit()


def test_one_process_is_one_host() -> None:
    with pytest.raises(ConfigurationError, match="2 hosts in one process"):
        InProcessBackend().launch(2, lambda: None)
    with pytest.raises(ConfigurationError, match="Expected one host"):
        ScalingConfig(num_hosts=2, in_process=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ScalingConfig(num_hosts=0), "num_hosts=0"),
        (lambda: ScalingConfig(num_hosts=-1), "num_hosts=-1"),
        (lambda: ScalingConfig(num_hosts=(3, 2)), r"num_hosts=\(3, 2\)"),
        (lambda: ScalingConfig(num_hosts=(0, 2)), r"num_hosts=\(0, 2\)"),
        (lambda: ScalingConfig(num_hosts=(1, 2, 3)), r"num_hosts=\(1, 2, 3\)"),  # type: ignore[arg-type]
        (lambda: FailureConfig(max_failures=-1), "max_failures=-1"),
        (lambda: FailureConfig(max_user_errors=-1), "max_user_errors=-1"),
        (lambda: FailureConfig(wait_for_hosts_s=float("nan")), "wait_for_hosts_s=nan"),
        (lambda: FailureConfig(quarantine_after=0), "quarantine_after=0"),
        (
            lambda: FailureConfig(quarantine_s=60.0, quarantine_period_s=50.0),
            "quarantine_s=60.0 and quarantine_period_s=50.0",
        ),
        (lambda: ScalingConfig(threads_per_host=0), "threads_per_host=0"),
        (lambda: ScalingConfig(exchange="two-hop"), "exchange='two-hop'"),
        (lambda: CheckpointConfig(every_steps=0), "every_steps=0"),
        (lambda: CheckpointConfig(every_seconds=0.0), "every_seconds=0.0"),
        (lambda: CheckpointConfig(every_seconds=float("nan")), "every_seconds=nan"),
        (lambda: CheckpointConfig(every_steps=5, seconds_apart=-1.0), "seconds_apart=-1.0 with every_steps=5"),
        (lambda: CheckpointConfig(seconds_apart=5.0), "seconds_apart=5.0 with every_steps=None"),
        (lambda: CheckpointConfig(num_to_keep=1), "num_to_keep=1"),
        (lambda: CheckpointConfig(keep_every_steps=0), "keep_every_steps=0"),
        (lambda: CheckpointConfig(keep_best=-1), "keep_best=-1"),
        (lambda: CheckpointConfig(metric=""), "metric=''"),
        (lambda: CheckpointConfig(metric_order="up"), "metric_order='up'"),  # type: ignore[arg-type]
        (lambda: RunConfig(max_steps=0), "max_steps=0"),
        (lambda: RunConfig(eval_every_steps=-5), "eval_every_steps=-5"),
        (lambda: RunConfig(max_steps="5"), "max_steps='5' in RunConfig"),  # type: ignore[arg-type]
        (lambda: RunConfig(checkpoint_config=None), "checkpoint_config=None in RunConfig"),  # type: ignore[arg-type]
        (lambda: RunConfig(warm_start="RUN"), "warm_start='RUN' in RunConfig"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_hosts="2"), "num_hosts='2'"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_hosts=2.0), "num_hosts=2.0"),  # type: ignore[arg-type]
        (lambda: CheckpointConfig(every_steps=1.5), "every_steps=1.5 in CheckpointConfig"),  # type: ignore[arg-type]
        (lambda: FailureConfig(max_failures=None), "max_failures=None in FailureConfig"),  # type: ignore[arg-type]
        (lambda: Trainer(None), "job=None for Trainer"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_refused_when_they_are_written(make: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Found {words}. Expected"):
        make()  # type: ignore[operator]


class NoBackend(InProcessBackend):
    """Nothing may be started."""

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        raise AssertionError("processes were started")


def test_a_finished_run_starts_nothing(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(small_data, tmp_path / "run", evaluate=True, eval_every_steps=10)
    record = read_history(Store(tmp_path / "run"))
    assert [made.step for made in record.evaluations] == [10, 20, STEPS]
    monkeypatch.setattr("podembed.orchestrator.cluster.joining.InProcessBackend", NoBackend)
    run = open_run(str(tmp_path / "run"))
    scaling = ScalingConfig(in_process=True)
    claims = read_claims(run.store)
    again = fit(run, scaling=scaling, config=RunConfig(max_steps=STEPS), reporter=SilentReporter())
    assert (again.step, again.commit, again.num_samples) == (STEPS, "s000000024-g00000001", 0)
    assert read_claims(run.store) == claims
    with pytest.raises(AssertionError, match="processes were started"):
        fit(run, scaling=scaling, config=RunConfig(max_steps=STEPS + 1), reporter=SilentReporter())


def test_a_program_gives_steps_in_epochs(small_data: str, tmp_path: Path) -> None:
    """An epoch has 20 steps."""
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": small_data, "evaluate": True})
    result = fit_job(
        reference,
        tmp_path,
        eval_every_steps="0.5epoch",
        max_steps="1.5epoch",
        checkpoint_config=CheckpointConfig(every_steps="0.25epoch", num_to_keep=2, keep_every_steps="1epoch"),
    )
    assert (result.step, result.total_steps) == (30, 30)
    assert [made.step for made in result.evaluations] == [10, 20, 30]
    assert [commit.step for commit in checkpoint.list_commits(Store(result.path))] == [30, 25, 20, 5]


def test_an_evaluation_that_a_lost_driver_owed_is_made(small_data: str, tmp_path: Path) -> None:
    train(small_data, tmp_path / "run", evaluate=True, evaluate_at_end=False)
    run = open_run(str(tmp_path / "run"))
    config = RunConfig(max_steps=STEPS)
    result = fit(run, scaling=ScalingConfig(in_process=True), config=config, reporter=SilentReporter())
    assert [made.step for made in result.evaluations] == [STEPS]
    assert [made.step for made in read_history(run.store).evaluations] == [STEPS]
    assert finished(run, config, run.newest_commit()) is not None


def test_the_history_has_each_step_once_over_several_drivers(small_data: str, tmp_path: Path) -> None:
    first = train(small_data, tmp_path / "run", stop_at=9)
    train(small_data, tmp_path / "run")
    record = read_history(Store(tmp_path / "run"))
    assert [window.step for window in record.windows][-1] == STEPS
    assert all(a.step == b.first_step for a, b in itertools.pairwise(record.windows))
    assert {window.generation for window in record.windows} == {1, 2}
    assert record.windows[0].loss == first.losses[0]
