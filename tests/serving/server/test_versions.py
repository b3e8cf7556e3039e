"""Versions come, go and come back while a server answers: whole, with the scores of their own commits."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.commit.lease_files import read_commit_names, read_lineage
from podembed.orchestrator.commit.published import (
    add_pin,
    hold,
    newest_pointer,
    pointer_numbers,
    published_commits,
    read_pins,
)
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.publish.following import Following
from podembed.serving.publish.listing import published_now, render_versions, roll_back
from podembed.serving.publish.publisher import publish
from podembed.serving.publish.versions import FILES, read_version, version_file
from podembed.serving.server.replica import Replica
from podembed.serving.server.rows import RowsByKey
from podembed.tools.fsck.check import check_run
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused
from tests.clock import FakeClock
from tests.orchestrator.committed_tables import flip_byte
from tests.serving.server.served_runs import listed, newest_commit, part, predicted, scored, store_of
from tests.small_job import small_job
from tests.training import fit_job

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module", params=[False, True], ids=["numbers", "keys"])
def job(request: pytest.FixtureRequest, small_data: str) -> JobConfig:
    return small_job(folder=small_data, audit=False, evaluate=True, dynamic=request.param)


@pytest.fixture
def columns(small_data: str) -> dict[str, list[Any]]:
    import pyarrow.parquet as pq

    found = listed(pq.read_table(sorted(Path(small_data).glob("*.parquet"))[0]))
    return part(found, 0, 150)


def expected(run: str, job: JobConfig, small_data: str, tmp_path: Path, commit: str) -> np.ndarray:
    path = sorted(Path(small_data).glob("*.parquet"))[0]
    return predicted(run, job, path, tmp_path / f"{commit}.parquet", commit=commit)[:150]


def test_versions_follow_each_other_and_come_back(
    job: JobConfig, small_data: str, columns: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Deltas, a full commit between them, a rollback, and what comes after it."""
    scores, names = {}, []
    replica: Replica | None = None
    run = ""
    for number, steps in enumerate((4, 7, 10, 13)):
        checkpoints = CheckpointConfig(every_steps=3, num_to_keep=2, full_every=3)
        run = fit_job(job, tmp_path, name="run", max_steps=steps, checkpoint_config=checkpoints).path
        found = publish(run, job=job, keep=3)
        assert (found.number, found.is_new, found.refused) == (number + 1, True, None)
        commit = newest_commit(run)
        names.append(found.version.name)
        scores[found.version.name] = expected(run, job, small_data, tmp_path, commit)
        replica = replica or Replica(store_of(run))
        assert replica.follow()
        assert replica.error is None
        assert replica.current is not None
        assert replica.current.name == found.version.name
        assert replica.current.has_same_bits
        assert scored(replica, columns).tobytes() == scores[found.version.name].tobytes()
    assert replica is not None
    assert replica.current is not None
    assert len({one.tobytes() for one in scores.values()}) == 4
    keyed = {name: table for name, table in replica.current.tables.items() if isinstance(table, RowsByKey)}
    for table in keyed.values():
        table.take_counts()
    scored(replica, columns)
    known = {name: table.take_counts() for name, table in keyed.items()}
    assert set(known) == {spec.name for spec in job.tables if spec.dynamic_keys is not None}
    assert all(0 < with_row <= asked for asked, with_row in known.values())
    arenas = [table.arena.shape for table in replica.current.tables.values()]
    before = replica.current
    # Back to the one before, which is still in memory; then further back, which is not.
    for wanted in (names[2], names[1], names[3], names[1], names[2]):
        pointer = roll_back(store_of(run), wanted)
        assert replica.follow()
        assert replica.current.name == wanted
        assert replica.current.number == pointer.number
        assert scored(replica, columns).tobytes() == scores[wanted].tobytes()
    assert [table.arena.shape for table in replica.current.tables.values()] == arenas
    assert any(isinstance(table, RowsByKey) for table in before.tables.values()) == any(
        spec.dynamic_keys is not None for spec in job.tables
    )
    # What the last three versions are made of stays, whatever the keep policy says.
    run = fit_job(job, tmp_path, name="run", max_steps=25, checkpoint_config=checkpoints).path
    kept = set(read_commit_names(store_of(run)))
    assert published_commits(store_of(run)) <= kept
    assert len(kept) == 2 + 3
    assert not replica.follow(), "nothing was published"
    assert scored(replica, columns).tobytes() == scores[names[2]].tobytes()


def test_what_answers_is_left_alone_while_the_next_is_made(
    small_data: str, columns: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Many swaps under load: each answer is that of one version."""
    job = small_job(folder=small_data, audit=False, evaluate=False)
    checkpoints = CheckpointConfig(every_steps=2, num_to_keep=9)
    run = fit_job(job, tmp_path, name="run", max_steps=8, checkpoint_config=checkpoints).path
    store = store_of(run)
    versions = [publish(run, commit=name, job=job).version.name for name in reversed(read_lineage(store))]
    scores = {
        name: expected(run, job, small_data, tmp_path, read_version(store, name).commit).tobytes() for name in versions
    }
    replica = Replica(store)
    replica.follow()
    ends, seen, wrong = threading.Event(), set(), []

    def ask() -> None:
        while not ends.is_set():
            with replica.use() as version:
                (outputs,) = version.model.score([version.model.read(columns)])
                if outputs["score"].tobytes() != scores[version.name]:
                    wrong.append(version.name)
                seen.add(version.name)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + 60
    for turn in range(12):
        name = versions[turn % len(versions)]
        roll_back(store, name)
        replica.follow()
        while name not in seen and time.monotonic() < until_s:
            time.sleep(0.001)
    ends.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen == set(versions)


def test_a_gate_keeps_a_worse_commit_back(job: JobConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fit_job(job, tmp_path, name="run", max_steps=4).path
    refused = publish(run, job=job, require="auc>=0.999")
    with pytest.raises(ConfigurationError, match=r"was refused: found auc=.*podembed publish"):
        published_now(store_of(run), run, folder="")
    assert refused.number is None
    assert newest_pointer(store_of(run)) is None
    assert refused.refused is not None
    assert refused.refused.endswith("required auc>=0.999")
    offered = publish(run, job=job, require=["auc>=0.01", "log_loss<=9"], max_drop=0.5)
    assert offered.number == 1
    assert offered.version == replace(refused.version, parent=None, **_times(offered))
    assert not publish(run, job=job).is_new
    assert publish(run, job=job, require="auc>=0.999").refused is not None, "also of the version that counts"
    text = render_versions(store_of(run))
    assert offered.version.name in text
    assert "counts" in text
    assert "auc" in text
    run = fit_job(job, tmp_path, name="run", max_steps=8).path
    missing = publish(run, job=job, require="recall>=0.1")
    assert missing.refused is not None
    assert "recall is required" in missing.refused
    worse = publish(run, job=job, require="auc<=-1")
    assert worse.refused is not None
    assert "not offered: found" in render_versions(store_of(run))
    with pytest.raises(ConfigurationError, match=r"Found --require 'auc'\. Expected a metric"):
        publish(run, job=job, require="auc")
    with pytest.raises(ConfigurationError, match=r"Found v.* alone .* Expected a version before it"):
        roll_back(store_of(run), None)
    # The command, for what was refused.
    assert offered.version.name in said(capsys, "versions", run)
    assert "is kept" in said(capsys, "pin", run, "--commit", "4")
    assert "by hand" in said(capsys, "pin", run)
    assert "left to the keep policies" in said(capsys, "pin", run, "--commit", "4", "--remove")
    assert "Found no pinned commit '4'" in said(capsys, "pin", run, "--commit", "4", "--remove", code=87)


def said(capsys: pytest.CaptureFixture[str], *command: str, code: int = 0) -> str:
    """What a command prints."""
    with pytest.raises(SystemExit) as found:
        main([*command])
    captured = capsys.readouterr()
    assert found.value.code == code, captured.err
    return captured.out + captured.err


def _times(published: Any) -> dict[str, float]:
    return {"created_unix_s": published.version.created_unix_s}


def test_a_publisher_that_starts_again_leaves_a_rollback_alone(job: JobConfig, tmp_path: Path) -> None:
    checkpoints = CheckpointConfig(every_steps=2, num_to_keep=9)
    run = fit_job(job, tmp_path, name="run", max_steps=6, checkpoint_config=checkpoints).path
    store = store_of(run)
    options = {"job": job}
    every = Following(run, every_commit=True, options=options)
    offers = list(every.new())
    assert [offer.version.commit for offer in offers] == list(reversed(read_lineage(store)))
    assert list(every.new()) == []
    roll_back(store, offers[0].version.name)
    assert list(Following(run, every_commit=False, options=options).new()) == []
    fit_job(job, tmp_path, name="run", max_steps=10, checkpoint_config=checkpoints)
    (newest,) = Following(run, every_commit=False, options=options).new()
    assert newest.version.commit == read_lineage(store)[0]


def test_pins_of_users_and_of_publishers_are_apart(job: JobConfig, tmp_path: Path) -> None:
    run = fit_job(job, tmp_path, name="run", max_steps=4).path
    store, commit = store_of(run), newest_commit(run)
    left = hold(store, commit, reason="of a publisher that was killed", unix_s=100.0, seconds=10.0)
    assert published_commits(store, now_unix_s=109.0) == {commit}
    assert published_commits(store, now_unix_s=111.0) == set()
    add_pin(store, commit, reason="legal hold", unix_s=100.0)
    publish(run, job=job)
    assert not store.exists(left), "ended ones are tidied"
    assert [pin.reason for pin in read_pins(store)] == ["legal hold"]


def test_damage_leaves_the_old_version_where_it_is(
    small_data: str, columns: dict[str, list[Any]], tmp_path: Path
) -> None:
    """A file of the commit, a file of the version, its record, the pointer, and a commit that is gone."""
    job = small_job(folder=small_data, audit=False, evaluate=False)
    checkpoints = CheckpointConfig(every_steps=3, num_to_keep=9)
    run = fit_job(job, tmp_path, name="run", max_steps=3, checkpoint_config=checkpoints).path
    store = Store(run)
    first = publish(run, job=job).version
    clock = FakeClock()
    replica = Replica(store, clock=clock)
    replica.follow()
    before = scored(replica, columns).tobytes()
    run = fit_job(job, tmp_path, name="run", max_steps=6, checkpoint_config=checkpoints).path
    second = publish(run, job=job).version
    files = [path for path in sorted(Path(run, "data", second.commit).rglob("*")) if path.is_file()]
    damages = [
        next(path for path in files if "/rows/c" in str(path)),
        next(path for path in files if "/dense/params" in str(path) and path.name == "0"),
        Path(run, FILES, second.files["schema.json"].sha256),
        Path(run, version_file(second.name)),
        Path(run, f"commit/{second.commit}.json"),
        Path(run, f"publish/pointers/{pointer_numbers(store)[-1]:08d}.json"),
    ]
    for path in damages:
        whole = path.read_bytes()
        for change in ("flip", "cut", "remove"):
            if change == "flip":
                flip_byte(path, len(whole) // 2)
            elif change == "cut":
                path.write_bytes(whole[: len(whole) // 2])
            else:
                path.unlink()
            if not (change == "remove" and "pointers" in str(path)):
                clock.sleep(100.0)
                assert not replica.follow(), (path, change)
                assert replica.error is not None
                assert "Found" in replica.error or "found" in replica.error or "missing" in replica.error
            assert replica.current is not None
            assert replica.current.name == first.name
            assert scored(replica, columns).tobytes() == before
            told = [finding.file for finding in check_run(run).findings]
            told += [finding.file for checked in check_run(run).commits for finding in checked.findings]
            assert any(str(path).endswith(file) for file in told) or (change == "remove" and "pointers" in str(path))
            path.write_bytes(whole)
    assert check_run(run).findings == ()
    assert replica.follow()
    assert replica.error is None
    assert scored(replica, columns).tobytes() != before
    flip_byte(damages[3], 40)
    with pytest.raises(DocumentRefused):
        read_version(store, second.name)


def test_a_version_that_cannot_be_loaded_is_not_loaded_all_the_time(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wrong probe not before the pointer changes, after an error of the storage with growing pauses."""
    job = small_job(folder=small_data, audit=False, evaluate=False)
    checkpoints = CheckpointConfig(every_steps=3, num_to_keep=9)
    run = fit_job(job, tmp_path, name="run", max_steps=6, checkpoint_config=checkpoints).path
    first, second = (publish(run, commit=name, job=job).version for name in reversed(read_lineage(store_of(run))))
    roll_back(store_of(run), first.name)
    clock = FakeClock()
    replica = Replica(store_of(run), clock=clock)
    replica.follow()
    loads: list[float] = []
    errors: list[Exception] = [ChunkDamaged("rows", "nothing", "something"), ModelError("Found other outputs.")]

    def fail(*arguments: Any) -> None:
        loads.append(clock.now_s)
        raise errors[0]

    with monkeypatch.context() as patch:
        patch.setattr(replica, "_load", fail)
        for tries in ([0, 2, 6, 14, 30, 62, 122, 182], [0]):
            roll_back(store_of(run), second.name)
            loads.clear()
            for _ in range(200):
                assert not replica.follow()
                assert replica.error == str(errors[0])
                clock.sleep(1.0)
            assert [at - loads[0] for at in loads] == tries
            errors.reverse()
            roll_back(store_of(run), first.name)
            assert not replica.follow(), "it answers already"
            assert replica.error is None
    roll_back(store_of(run), second.name)
    assert replica.follow()
