"""Callbacks hear what happens in its order, may ask to stop, and can neither end nor hold up a run by themselves."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podembed import Callback, CheckpointConfig, JobError, Reporter, Result, SilentReporter
from podembed.orchestrator.events import callbacks as module
from podembed.orchestrator.events.callbacks import CallbackThread
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.run import CallbackFailed, CallbacksLeft
from podembed.orchestrator.run.run import OpenRun
from tests.small_job import small_job
from tests.training import fit_job


class Recorder(Callback):
    def __init__(self, stop_at: int | None = None) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self.stop_at = stop_at
        # Cannot be sent to another process.
        self.lock = threading.Lock()

    def _take(self, what: str, value: Any) -> None:
        self.heard.append((what, value))
        self.threads.add(threading.current_thread().name)

    def on_begin(self, path: str, arguments: dict[str, Any]) -> None:
        self._take("begin", path)

    def on_window(self, report: Any) -> str | None:
        self._take("window", report.step)
        return "enough" if self.stop_at is not None and report.step >= self.stop_at else None

    def on_evaluation(self, evaluation: Any) -> None:
        self._take("evaluation", evaluation.step)

    def on_commit(self, name: str, step: int) -> None:
        self._take("commit", step)

    def on_end(self, result: Any) -> None:
        self._take("end", result)


class Broken(Callback):
    def on_window(self, report: Any) -> str | None:
        raise ValueError("no such tracker")

    def on_commit(self, name: str, step: int) -> Any:
        return 17


class Listener(SilentReporter):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


def train(data: str, folder: Path, *callbacks: Callback, reporter: Reporter | None = None) -> Result:
    job = replace(small_job(folder=data, audit=False, evaluate=True), callbacks=callbacks)
    return fit_job(
        job,
        folder,
        max_steps=12,
        eval_every_steps=4,
        checkpoint_config=CheckpointConfig(every_steps=6),
        reporter=reporter,
    )


def test_they_hear_all_in_its_order_in_one_thread(small_data: str, tmp_path: Path) -> None:
    recorder, listener = Recorder(), Listener()
    result = train(small_data, tmp_path, recorder, Broken(), reporter=listener)
    assert recorder.heard[0] == ("begin", str(tmp_path / "run"))
    assert recorder.heard[-1] == ("end", result)
    assert [step for what, step in recorder.heard if what == "evaluation"] == [4, 8, 12]
    assert [step for what, step in recorder.heard if what == "commit"] == [6, 12]
    windows = [step for what, step in recorder.heard if what == "window"]
    assert windows == sorted(windows)
    assert windows[-1] == 12
    assert recorder.heard.index(("window", 4)) < recorder.heard.index(("evaluation", 4))
    assert recorder.threads == {"callbacks"}
    failed = [event for event in listener.events if isinstance(event, CallbackFailed)]
    assert [(event.callback, event.method) for event in failed] == [("Broken", "on_window"), ("Broken", "on_commit")]
    assert "no such tracker" in failed[0].error
    assert "in on_window" in failed[0].trace
    assert "Found 17" in failed[1].error


def test_one_that_asks_to_stop_leaves_a_run_that_goes_on_later(small_data: str, tmp_path: Path) -> None:
    result = train(small_data, tmp_path, Recorder(stop_at=4))
    assert (result.step, result.stopped_by, result.commit) == (4, "Recorder (enough)", "s000000004-g00000001")
    assert train(small_data, tmp_path, Recorder()).step == 12


def test_workers_get_the_job_without_them(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    original = OpenRun.job_for_workers.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(OpenRun, "job_for_workers", property(lambda run: sent.append(original(run)) or sent[-1]))
    train(small_data, tmp_path, Recorder())
    assert sent
    assert all(job.callbacks == () for job in sent)


def test_one_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    monkeypatch.setattr(module, "END_WAIT_S", 0.1)
    forever = threading.Event()

    class Hung(Callback):
        def on_begin(self, path: str, arguments: dict[str, Any]) -> None:
            forever.wait(60)

    events: list[Event] = []
    with CallbackThread((Hung(),), emit=events.append) as callbacks:
        callbacks.begin("run", {}, request=lambda reason: None)
    forever.set()
    late, left = events
    assert isinstance(late, CallbackFailed)
    assert (late.callback, late.method) == ("Hung", "on_begin")
    assert "not come back within 0.05 s" in late.error
    assert isinstance(left, CallbacksLeft)
    assert left.untold == 2


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "raised",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Unspeakable(), ValueError("x" * 200_000 + "\x1b[2J")],
)
def test_none_silences_the_others_whatever_it_raises(raised: BaseException) -> None:
    recorder, events = Recorder(), []

    class Raising(Callback):
        def on_begin(self, path: str, arguments: dict[str, Any]) -> None:
            raise raised

    def never(reason: str) -> None:
        raise AssertionError(reason)

    began_s = time.monotonic()
    with CallbackThread((Raising(), recorder), emit=events.append) as callbacks:
        callbacks.begin("run", {}, request=never)
        callbacks.begin("again", {}, request=never)
    assert time.monotonic() - began_s < module.WAIT_S
    assert recorder.heard == [("begin", "run"), ("begin", "again"), ("end", None)]
    (failed,) = events
    assert isinstance(failed, CallbackFailed)
    assert failed.error.startswith(type(raised).__name__)
    assert ("return a text that says why" in failed.error) == (not isinstance(raised, Exception))
    assert len(failed.error) + len(failed.trace) < 30_000
    assert "\x1b" not in failed.error + failed.trace


def test_what_is_no_callback_is_refused(small_data: str) -> None:
    job = small_job(folder=small_data, audit=False)
    with pytest.raises(JobError, match=r"callbacks=\(MyCallback\(\),\)"):
        replace(job, callbacks=(Recorder,))
    assert len(replace(job, callbacks=[Recorder()]).callbacks) == 1  # type: ignore[arg-type]
