"""Loss and evaluations in a run's folder: each step once whatever happened, one small file, and nothing that can stop a
run.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from podembed.orchestrator.api.result import Evaluation
from podembed.orchestrator.run import history_record
from podembed.orchestrator.run.history import History
from podembed.orchestrator.run.history_record import HistoryKeeper, HistoryRecord, RecordedEvaluation, read_history
from podembed.tools.fsck.check import check_run
from podembed.tools.inspect.inspect_run import describe, render
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused
from tests.orchestrator.commit.checkpoint_samples import take
from tests.orchestrator.committed_tables import commit_tables, create_run, flip_byte, random_table
from tests.sentences import saying


def train(history: History, generation: int, *bounds: int, evaluate: bool = True) -> None:
    """Windows between neighbouring bounds; the loss is the generation's number plus a part for the step. An evaluation
    after each.
    """
    for first, last in itertools.pairwise(bounds):
        history.window(
            generation=generation,
            first_step=first,
            losses=[generation + first / 1000] * (last - first),
            num_samples=10 * (last - first),
            phase_s={},
            phase_cpu_s={},
            began_s=float(first),
            ended_s=float(last),
        )
        if evaluate:
            made = Evaluation(step=last, auc=0.5 + last / 1000 - generation / 100, log_loss=float("nan"), num_samples=7)
            history.evaluation(made, seconds=0.1)


def keeper(store: Store, told: list[str] | None = None) -> HistoryKeeper:
    return HistoryKeeper(store, emit=saying(told if told is not None else []))


def spans(record: HistoryRecord) -> list[tuple[int, int, int]]:
    return [(window.generation, window.first_step, window.step) for window in record.windows]


def test_a_recovery_and_another_driver_leave_each_step_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, history = keeper(store), History()
    first.begin(0)
    train(history, 1, 0, 10, 20, 30)
    first.write(first.record(history, generation=1, step=20))
    # A fault after step 30; the newest commit is of step 20.
    history.cut(20)
    first.begin(20)
    train(history, 2, 20, 40)
    first.write(first.record(history, generation=2, step=40))
    assert spans(read_history(store)) == [(1, 0, 10), (1, 10, 20), (2, 20, 40)]
    # Another driver goes back to an older commit, since the newest is damaged.
    second, history = keeper(store), History()
    second.begin(20)
    train(history, 3, 20, 25)
    second.write(second.record(history, generation=3, step=25))
    record = read_history(store)
    assert spans(record) == [(1, 0, 10), (1, 10, 20), (3, 20, 25)]
    assert [(made.generation, made.step) for made in record.evaluations] == [(1, 10), (1, 20), (3, 25)]
    assert record.evaluations[0].metrics == {"auc": pytest.approx(0.5)}, "what is not finite is left out"
    assert store.list("history") == ["history/g00000003-00001.json"]


def test_a_late_record_of_a_driver_that_was_replaced_does_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    new, old, history = keeper(store), keeper(store), History()
    for each in (new, old):
        each.begin(0)
    train(history, 2, 0, 10)
    new.write(new.record(history, generation=2, step=10))
    late = History()
    train(late, 1, 0, 90)
    old.write(old.record(late, generation=1, step=90))
    assert spans(read_history(store)) == [(2, 0, 10)]


def test_the_best_is_the_highest_auc_and_the_lowest_loss_and_the_first_of_equals() -> None:
    values = [(1, 0.6, 0.5), (2, 0.8, 0.4), (3, 0.8, 0.45), (4, 0.7, 0.4)]
    record = HistoryRecord(
        evaluations=tuple(
            RecordedEvaluation(generation=1, step=step, num_samples=1, metrics={"auc": auc, "log_loss": loss})
            for step, auc, loss in values
        )
    )
    best, lowest = record.best("auc"), record.best("log_loss")
    assert best is not None
    assert lowest is not None
    assert (best.step, lowest.step, record.best("recall")) == (2, 2, None)


def test_a_long_history_stays_small_and_keeps_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_record, "MAX_WINDOWS", 8)
    monkeypatch.setattr(history_record, "MAX_EVALUATIONS", 8)
    store, history = Store(tmp_path), History()
    kept = keeper(store)
    kept.begin(0)
    train(history, 1, *range(0, 101, 5))
    record = kept.record(history, generation=1, step=100)
    assert len(record.windows) <= 8
    assert record.windows[0].first_step == 0
    assert record.windows[-1].step == 100
    assert all(a.step == b.first_step for a, b in itertools.pairwise(record.windows))
    assert sum(window.num_samples for window in record.windows) == 1000
    steps = sum((window.step - window.first_step) * window.loss for window in record.windows)
    assert steps == pytest.approx(sum(5 * window.loss for window in history.windows))
    assert len(record.evaluations) <= 8
    assert record.evaluations[-1].step == 100
    best = record.best("auc")
    assert best is not None
    assert best.step == max(history.evaluations, key=lambda made: made.auc).step


def test_a_damaged_record_stops_nobody_and_fsck_names_it(tmp_path: Path) -> None:
    store, lease = create_run(
        tmp_path / "run", {"users": random_table(1, num_rows=37, num_buckets=4, widths={"rows": 3})}
    )
    told: list[str] = []
    kept, history = keeper(store, told), History()
    kept.begin(0)
    train(history, 1, 0, 10)
    kept.write(kept.record(history, generation=1, step=10))
    assert check_run(store.location).is_intact
    flip_byte(tmp_path / "run/history/g00000001-00001.json", at=20)
    with pytest.raises(DocumentRefused, match=r"history/g00000001-00001\.json"):
        read_history(store)
    (finding,) = check_run(store.location).all_findings
    assert finding.file == "history/g00000001-00001.json"
    assert "delete the file" in finding.remedy
    assert "fsck names it" in render(describe(store, now_unix_s=0.0))
    again = keeper(store, told)
    again.begin(0)
    assert "training is not touched" in told[-1]
    again.write(again.record(history, generation=2, step=10))
    assert read_history(store).windows == tuple(history.windows)
    lease.release()
    # The one that wrote it.
    take(store).release()
    assert check_run(store.location).is_intact


def test_a_record_that_cannot_be_written_is_told_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("a file where the folder should be")
    told: list[str] = []
    kept, history = keeper(Store(tmp_path), told), History()
    kept.begin(0)
    train(history, 1, 0, 10)
    kept.write(kept.record(history, generation=1, step=10))
    told.clear()
    kept.tell()
    assert len(told) == 1
    assert "were not written to history/, training is not touched" in told[0]
    kept.tell()
    assert len(told) == 1


def test_inspect_shows_the_newest_evaluations_and_the_best(tmp_path: Path) -> None:
    tables = {"users": random_table(1, num_rows=37, num_buckets=4, widths={"rows": 3})}
    store, lease = create_run(tmp_path / "run", tables)
    commit_tables(store, lease, 60, tables)
    commit_tables(store, lease, 200, tables)
    kept, history = keeper(store), History()
    kept.begin(0)
    train(history, 1, *range(0, 201, 10))
    history.evaluations[2] = Evaluation(step=30, auc=0.99, log_loss=0.1, num_samples=7)
    kept.write(kept.record(history, generation=1, step=200))
    text = render(describe(store, now_unix_s=0.0))
    assert "Loss 1.1900 in steps 190 to 199" in text
    assert "Evaluations, the newest 8 of 20 and the best" in text
    (best,) = [line.split() for line in text.splitlines() if "0.9900 best" in line]
    assert (best[0], best[-2:]) == ("30", ["none", "kept"])
    (last,) = [line.split() for line in text.splitlines() if line.split()[:2] == ["200", "1"] and "0.6900" in line]
    assert last[-1] == "s000000200-g00000001"
    lease.release()
