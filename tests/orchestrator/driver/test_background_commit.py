"""Commits beside training: on whole runs in this process, with storage that is slow or fails at a chosen file, and on a
scripted group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease import PublicationUnsettled
from podembed.orchestrator.commit.patience import FULL_AT_STOP_S, Patience, SavesFailed
from podembed.orchestrator.driver.background_commit import FIRST_WAIT_S, BackgroundCommits
from podembed.orchestrator.driver.publication import Answer, Published, SaveLost, Unsettled
from podembed.orchestrator.events.commits import SaveFailed
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.group.worker_group import WorkerGroup
from podembed.workers.liveness.worker import Worker
from podembed.workers.storage.storage_errors import NameTaken
from podembed.workers.storage.store import Store
from tests.clock import FakeClock
from tests.orchestrator.cluster.test_in_process import STEPS, train
from tests.orchestrator.group.test_worker_group import NEVER, QUICK, ScriptedBackend, progress
from tests.run_state import assert_same_bytes, committed_state, tables_of
from tests.sentences import saying

PATIENCE_S = 120.0


class Watcher(SilentReporter):
    """Remembers what it was told, in order, and lets a test act on each window."""

    def __init__(self, on_window: Callable[[WindowReport], None] = lambda report: None) -> None:
        self.events: list[tuple[str, int]] = []
        self.windows: list[WindowReport] = []
        self._on_window = on_window

    def window(self, report: WindowReport) -> None:
        self.windows.append(report)
        self.events.append(("step", report.step))
        self._on_window(report)

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self.events.append(("commit", int(name[1:10])))


def before_each_file(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Calls `act` with the name of each new file before it is written, in the thread that writes it."""
    real = Store.write_new

    def write_new(self: Store, name: str, buffers: Sequence[Any]) -> None:
        act(name)
        real(self, name, buffers)

    monkeypatch.setattr(Store, "write_new", write_new)


@pytest.fixture(scope="module")
def undisturbed(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(small_data, tmp_path_factory.mktemp("undisturbed") / "run")


def test_training_goes_on_while_a_commit_is_written(
    undisturbed: Result, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of step 10 are held back until the windows after it have run; the commit holds the state of step 10 all
    the same.
    """
    passed = threading.Event()

    def hold(name: str) -> None:
        if "s000000010" in name:
            assert passed.wait(PATIENCE_S)

    before_each_file(monkeypatch, hold)
    watcher = Watcher(lambda report: passed.set() if report.step > 11 else None)
    result = train(
        small_data,
        tmp_path / "run",
        reporter=watcher,
        checkpoint_config=CheckpointConfig(every_steps=10, num_to_keep=None),
    )
    commits = [event for event in watcher.events if event[0] == "commit"]
    assert commits == [("commit", 10), ("commit", 20), ("commit", STEPS)]
    late = watcher.events[: watcher.events.index(("commit", 10))]
    assert max(step for kind, step in late if kind == "step") > 11
    assert all(w.committed_step == 0 for w in watcher.windows if w.step <= 12)
    assert all(w.committed_unix_s is None for w in watcher.windows if w.committed_step == 0)
    assert dict(result.losses) == dict(undisturbed.losses)
    assert_same_bytes(committed_state(result.path), committed_state(undisturbed.path))
    stopped = train(small_data, tmp_path / "stopped", max_steps=10)
    store = Store(result.path)
    manifest = checkpoint.load(store, "s000000010-g00000001")
    head = checkpoint.load_head(Store(stopped.path))
    assert head is not None
    assert [table.digests for table in manifest.tables] == [table.digests for table in head.tables]
    assert_same_bytes(tables_of(store, manifest), tables_of(Store(stopped.path), head))
    assert [leaf.crc32c for leaf in manifest.dense] == [leaf.crc32c for leaf in head.dense]


def test_the_next_commit_waits_for_the_one_before(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of one step and a commit at each; a slow disk. None is left out, and at most one attempt is ever under
    way.
    """
    seen: list[str] = []

    def slow(name: str) -> None:
        attempt = name.split("/")[1]
        if not seen or seen[-1] != attempt:
            assert attempt not in seen, "files of two attempts are written in turn"
            seen.append(attempt)
        time.sleep(0.01)

    before_each_file(monkeypatch, slow)
    watcher = Watcher()
    train(
        small_data, tmp_path / "run", reporter=watcher, max_steps=5, checkpoint_config=CheckpointConfig(every_steps=1)
    )
    assert [step for kind, step in watcher.events if kind == "commit"] == [1, 2, 3, 4, 5]
    assert len(seen) == 5


def commits_of(
    script: dict[tuple[Worker, str], Any], on_poll: Callable[[], None] = lambda: None, **options: Any
) -> tuple[BackgroundCommits, ScriptedBackend, list[int]]:
    """A group of one host on a script, and the steps that were acknowledged."""

    def answer(worker: Worker, method: str) -> Any:
        return script.get((worker, method), progress(1) if method == "control status" else None)

    backend = ScriptedBackend(answer)
    group = WorkerGroup(backend, backend.launch(1, lambda: None), QUICK, on_poll, clock=backend.clock)
    acknowledged: list[int] = []
    commits = BackgroundCommits(
        group,
        generation=3,
        head=None,
        full_every=2,
        acknowledge=lambda manifest, seconds: acknowledged.append(manifest.step),
        **options,
    )
    return commits, backend, acknowledged


@dataclass
class ScriptedPublication:
    """Succeeds; every second commit is a delta. `left`: why files of a lost save are left, per try."""

    step: int
    cleared: list[SaveLost] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    settles: list[Answer | None] = field(default_factory=list)

    def publish(self, parent: Any, receipts: Any, *, failed_saves: int) -> Answer:
        self.before()
        num_deltas = 0 if parent is None or parent.num_deltas else 1
        manifest: Any = SimpleNamespace(step=self.step, parent=parent, receipts=receipts, num_deltas=num_deltas)
        return self._settled(Published(manifest=manifest))

    def settle(self, unsettled: Unsettled) -> Answer:
        return self._settled(Published(manifest=unsettled.manifest))

    def clear(self, lost: SaveLost) -> SaveLost:
        self.cleared.append(lost)
        return replace(lost, left=self.left.pop(0) if self.left else None)

    def _settled(self, answer: Published) -> Answer:
        """That it is unknown whether the commit stands, as often as `settles` says."""
        if not self.settles:
            return answer
        return self.settles.pop(0) or answer


def published(step: int) -> ScriptedPublication:
    return ScriptedPublication(step)


def test_a_commit_is_acknowledged_once_and_becomes_the_parent_of_the_next() -> None:
    commits, backend, acknowledged = commits_of(
        {(Worker("host", 0), "write_save"): "rows", (Worker("device", 0), "write_save"): "dense"}
    )
    assert (commits.committed_step, commits.begun_step) == (0, 0)
    commits.begin(10, published(10))
    assert (commits.committed_step, commits.begun_step) == (0, 10)
    assert (Worker("host", 0), "write_save", ("s000000010-g00000003", False)) in backend.asked
    commits.begin(20, published(20))
    assert (commits.committed_step, commits.begun_step) == (10, 20)
    assert (Worker("host", 0), "write_save", ("s000000020-g00000003", True)) in backend.asked
    first: Any = commits.head
    assert first.receipts == (["rows"], ["dense"])
    commits.finish()
    commits.finish()
    commits.poll()
    second: Any = commits.head
    assert second.parent is first
    assert acknowledged == [10, 20]
    commits.close()


def test_after_a_fault_only_what_all_had_written_is_published() -> None:
    lost = Failure(worker=Worker("host", 0), kind=FailureKind.DIED, message="scripted")
    commits, _, acknowledged = commits_of({(Worker("host", 0), "write_save"): lost})
    commits.begin(10, published(10))
    commits.leave(can_finish=False)
    assert acknowledged == []
    commits.close()
    commits, _, acknowledged = commits_of({})
    commits.begin(10, published(10))
    commits.leave(can_finish=False)
    assert acknowledged == [10]
    commits.close()


def test_workers_that_live_may_finish_writing_before_the_run_ends() -> None:
    left = iter([NEVER] * 5)
    commits, _, acknowledged = commits_of({(Worker("host", 0), "write_save"): lambda: next(left, "rows")})
    commits.begin(10, published(10))
    commits.leave(can_finish=True)
    assert acknowledged == [10]
    commits.close()


def test_a_driver_that_waits_for_a_publication_after_a_fault_still_gives_signs_of_life() -> None:
    """Reading a large commit back takes minutes: hosts that live on would take the driver for gone, and so would
    another driver.
    """
    has_polled = threading.Event()

    def on_poll() -> None:
        has_polled.set()
        raise WorkerFailure([Failure(worker=Worker("host", 0), kind=FailureKind.HUNG, message="its machine goes")])

    def wait() -> None:
        assert has_polled.wait(PATIENCE_S)

    commits, _, acknowledged = commits_of({}, on_poll)
    commits.begin(10, ScriptedPublication(10, before=wait))
    commits.leave(can_finish=False)
    assert acknowledged == [10]
    commits.close()


def test_a_worker_that_is_gone_is_found_by_who_waits_for_it() -> None:
    lost = Failure(worker=Worker("host", 0), kind=FailureKind.DIED, message="scripted")
    commits, _, _ = commits_of({(Worker("host", 0), "write_save"): lost})
    commits.begin(10, published(10))
    commits.poll()
    with pytest.raises(WorkerFailure, match="host 0 died"):
        commits.finish()
    commits.close()


def storage_failure(worker: Worker) -> Failure:
    return Failure(worker=worker, kind=FailureKind.ERROR, message="StorageFull: no room", is_storage=True)


def test_a_save_that_the_storage_failed_is_cleared_away_when_all_have_ended_and_the_next_one_knows() -> None:
    answers: dict[tuple[Worker, str], Any] = {(Worker("host", 0), "write_save"): storage_failure(Worker("host", 0))}
    left = iter([NEVER] * 3)
    answers[Worker("device", 0), "write_save"] = lambda: next(left, "dense")
    events: list[Any] = []
    publication = ScriptedPublication(10, cleared=events)
    commits, backend, acknowledged = commits_of(answers, failed=events.append)
    commits.begin(10, publication)
    commits.poll()
    assert events == [], "removed while another worker still writes"
    commits.finish()
    assert events[0] == SaveLost(reason="host 0 failed: StorageFull: no room.", is_full=True)
    assert "SAVE FAILED at step 10 (number 1 in a row): host 0 failed: StorageFull: no room" in events[1].sentence()
    answers[Worker("host", 0), "write_save"] = "rows"
    commits.begin(20, published(20))
    begun = [
        arguments
        for worker, method, arguments in backend.asked
        if (worker, method) == (Worker("host", 0), "begin_save")
    ]
    assert begun == [("s000000010-g00000003", False), ("s000000020-g00000003", True)]
    commits.finish()
    assert (acknowledged, commits.failed_in_a_row) == ([20], 0)
    commits.begin(30, published(30))
    assert [arguments for worker, method, arguments in backend.asked if method == "begin_save"][-2][1] is False
    commits.close()


@pytest.mark.parametrize("timeout_s", [0.0, 100.0])
def test_the_end_waits_for_its_commit_as_long_as_it_may(timeout_s: float) -> None:
    failures: list[SaveFailed] = []
    commits, _, acknowledged = commits_of(
        {(Worker("host", 0), "write_save"): storage_failure(Worker("host", 0))},
        failed=failures.append,
        patience=Patience(timeout_s=timeout_s),
        clock=FakeClock(),
    )
    commits.begin(10, published(10))
    with pytest.raises(SavesFailed, match=f"within {timeout_s:.0f} s: host 0 failed: StorageFull: no room"):
        commits.conclude(10, published(10))
    # After 1, 2, 4, 8, 16 and twice 30 s; one more wait would be beyond.
    assert len(failures) == (1 if timeout_s == 0 else 8)
    assert [failure.in_a_row for failure in failures] == list(range(1, len(failures) + 1))
    assert acknowledged == []
    commits.close()


def test_a_run_that_is_to_end_says_why_it_does_not_and_gives_a_full_disk_up_soon() -> None:
    """Asked to stop while it waits: what fails, for how long it is tried, and that a second Ctrl-C leaves at once."""
    clock, notices = FakeClock(), []
    commits, _, _ = commits_of(
        {(Worker("host", 0), "write_save"): storage_failure(Worker("host", 0))},
        patience=Patience(timeout_s=1800.0),
        clock=clock,
        emit=saying(notices),
        is_stopping=lambda: clock.monotonic_s() - started_s >= 20.0,
    )
    started_s = clock.monotonic_s()
    commits.begin(10, published(10))
    with pytest.raises(SavesFailed, match="StorageFull: no room.*Mend the storage, then resume"):
        commits.conclude(10, published(10))
    assert 20.0 < clock.monotonic_s() - started_s < 20.0 + FULL_AT_STOP_S + 1.0
    (told,) = notices
    for words in (
        "StorageFull: no room",
        f"up to {FULL_AT_STOP_S:.0f} s",
        "Ctrl-C once more leaves at once",
        "from step 0",
    ):
        assert words in told
    commits.close()


def test_a_storage_that_may_come_back_is_tried_as_long_as_ever_when_the_run_is_to_end() -> None:
    clock, notices = FakeClock(), []
    away = Failure(worker=Worker("host", 0), kind=FailureKind.ERROR, message="StoreUnavailable: away", is_storage=True)
    commits, _, _ = commits_of(
        {(Worker("host", 0), "write_save"): away},
        patience=Patience(timeout_s=100.0),
        clock=clock,
        emit=saying(notices),
        is_stopping=lambda: True,
    )
    commits.begin(10, published(10))
    with pytest.raises(SavesFailed, match="within 100 s"):
        commits.conclude(10, published(10))
    assert [("up to 100 s" in told, "StoreUnavailable: away" in told) for told in notices] == [(True, True)]
    commits.close()


def test_nothing_is_saved_again_while_files_of_the_failed_attempt_are_left() -> None:
    """The same step has the same names."""
    failed = iter([storage_failure(Worker("host", 0))])
    answer: list[Any] = []

    def write() -> Any:
        # One answer for each call, however often it is looked at.
        asked = sum(method == "write_save" and worker == Worker("host", 0) for worker, method, _ in backend.asked)
        while len(answer) < asked:
            answer.append(next(failed, "rows"))
        return answer[-1]

    failures: list[SaveFailed] = []
    commits, backend, acknowledged = commits_of(
        {(Worker("host", 0), "write_save"): write}, failed=failures.append, clock=FakeClock()
    )
    publication = ScriptedPublication(10, left=["not yours"] * 3)
    commits.begin(10, publication)
    commits.conclude(10, publication)
    assert [failure.left is None for failure in failures] == [False, False, False, True]
    assert len(answer) == 2
    assert acknowledged == [10]
    commits.close()


def test_errors_that_no_waiting_mends_end_the_run() -> None:
    def refuse() -> None:
        raise NameTaken("data/x", "/run")

    commits, _, _ = commits_of({})
    commits.begin(10, ScriptedPublication(10, before=refuse))
    with pytest.raises(NameTaken):
        commits.finish()
    commits.close()
    broken = Failure(worker=Worker("host", 0), kind=FailureKind.ERROR, message="ValueError: ours")
    commits, _, _ = commits_of(
        {
            (Worker("host", 0), "write_save"): broken,
            (Worker("device", 0), "write_save"): storage_failure(Worker("device", 0)),
        }
    )
    commits.begin(10, published(10))
    with pytest.raises(WorkerFailure, match="ours"):
        commits.finish()
    commits.close()


def unsettled(step: int) -> Unsettled:
    manifest: Any = SimpleNamespace(step=step, num_deltas=0)
    return Unsettled(manifest=manifest, error=PublicationUnsettled(f"step {step}", "/run"))


def test_a_commit_of_which_nobody_knows_is_asked_after_until_there_is_an_answer() -> None:
    """The driver's thread goes on meanwhile, and says so once; the next save waits."""
    clock, notices = FakeClock(), []
    commits, _, acknowledged = commits_of({}, clock=clock, emit=saying(notices))
    commits.begin(10, ScriptedPublication(10, settles=[unsettled(10), unsettled(10), None]))
    while not notices:
        commits.poll()
    commits.poll()
    assert acknowledged == []
    assert "nobody knows whether it stands" in notices[0]
    began_s = clock.monotonic_s()
    commits.begin(20, published(20))
    assert clock.monotonic_s() - began_s == pytest.approx(3 * FIRST_WAIT_S, abs=0.2)
    commits.finish()
    assert (acknowledged, len(notices)) == ([10, 20], 1)
    commits.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_commit_of_which_nobody_knows_for_too_long_ends_the_run(leaves: bool) -> None:
    """After a fault it is not asked after any more: the next generation finds out."""
    clock, notices = FakeClock(), []
    commits, _, acknowledged = commits_of({}, clock=clock, emit=saying(notices), patience=Patience(timeout_s=5.0))
    commits.begin(10, ScriptedPublication(10, settles=[unsettled(10)] * 9))
    while not notices:
        commits.poll()
    if leaves:
        commits.leave(can_finish=True)
    else:
        with pytest.raises(PublicationUnsettled, match="step 10"):
            commits.finish()
    assert acknowledged == []
    commits.close()
