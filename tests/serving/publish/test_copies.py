"""Copies for servers: what is in them, what answers come of them, and what a publisher that ends anywhere leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.commit.checkpoint import load
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.published import add_pin, hold, newest_pointer
from podembed.serving.predict.committed_model import CommittedModel, CommittedRows, with_commit
from podembed.serving.publish import copies
from podembed.serving.publish.listing import render_versions, roll_back
from podembed.serving.publish.publisher import publish
from podembed.serving.row_form import RowForm
from podembed.serving.served_files import served_files
from podembed.serving.server.replica import Replica, ServedVersion
from podembed.tools.fsck.check import check_run
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.storage.store import Store
from tests.orchestrator.committed_tables import flip_byte
from tests.serving.server.served_runs import data_table, listed, part, scored
from tests.small_job import small_job
from tests.training import fit_job

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CHECKPOINTS = CheckpointConfig(every_steps=3, num_to_keep=9, full_every=3)


@pytest.fixture
def columns(small_data: str) -> dict[str, list[Any]]:
    return part(listed(data_table(Path(small_data))), 0, 150)


def answers(store: Store, columns: dict[str, list[Any]]) -> bytes:
    replica = Replica(store)
    replica.follow()
    assert replica.current is not None
    assert replica.current.has_same_bits
    return scored(replica, columns).tobytes()


def code_of(*command: str) -> object:
    with pytest.raises(SystemExit) as found:
        main([*command])
    return found.value.code


def test_a_copy_answers_as_the_run_does(small_data: str, columns: dict[str, list[Any]], tmp_path: Path) -> None:
    """Deltas, a full commit between them, a rollback; the copy keeps two versions and what is pinned."""
    job = small_job(folder=small_data, audit=False, dynamic=True)
    url = str(tmp_path / "copy")
    target = Store(url)
    follower = Replica(target)
    offers, scores = [], []
    for steps in (4, 7, 10, 13):
        run = fit_job(job, tmp_path, max_steps=steps, checkpoint_config=CHECKPOINTS).path
        offers.append(publish(run, to=url, job=job))
        # A version is what it answers, so it has one name wherever it is.
        assert publish(run, job=job).version.name == offers[-1].version.name
        scores.append(answers(Store(run), columns))
        assert follower.follow()
        assert scored(follower, columns).tobytes() == scores[-1]
        if steps == 4:
            add_pin(target, offers[0].version.commit, reason="test", unix_s=0.0)
    assert len(set(scores)) == 4
    copied = [offer.copied for offer in offers]
    assert all(one is not None for one in copied)
    sizes = [one.num_bytes for one in copied if one is not None]
    assert min(sizes) < max(sizes) / 20, "deltas alone"
    again = publish(run, to=url, job=job)
    assert again.copied == copies.Copied(num_files=0, num_bytes=0)
    assert again.number == newest_pointer(target).number  # pyright: ignore[reportOptionalMemberAccess]
    kept = {offers[at].version.commit for at in (0, 2, 3)}
    assert set(read_commit_names(target)) == kept
    assert not [name for name in target.list() if "accumulator" in name or "optimizer" in name or "count" in name]
    checked = check_run(url)
    assert checked.is_intact
    assert not checked.leftovers
    assert checked.is_copy
    with pytest.raises(ConfigurationError, match="Found no commit 's1'"):
        check_run(url, commit="s1")
    assert "its commit is gone" in render_versions(target)
    roll_back(target, None)
    assert follower.follow()
    assert scored(follower, columns).tobytes() == scores[2]
    with pytest.raises(ConfigurationError, match="Found no manifest of commit"):
        roll_back(target, offers[1].version.name)
    # What is no run is not trained, and what is a run is no copy.
    for command in (["resume", url], ["inspect", url], ["publish", url], ["prune", url, "--keep", "2"]):
        assert code_of(*command) == 87, command
    with pytest.raises(ConfigurationError, match="Found a copy for servers"):
        fit_job(job, tmp_path, name="copy", max_steps=20)
    with pytest.raises(ConfigurationError, match="Found a run in"):
        publish(run, to=run, job=job)
    other = fit_job(job, tmp_path, name="other", max_steps=2).path
    with pytest.raises(ConfigurationError, match="Found a copy of run"):
        publish(other, to=url, job=job)


def test_damage_is_found_and_copied_again(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False)
    run = fit_job(job, tmp_path, max_steps=4, checkpoint_config=CHECKPOINTS).path
    run = fit_job(job, tmp_path, max_steps=6, checkpoint_config=CHECKPOINTS).path
    url = str(tmp_path / "copy")
    offer = publish(run, to=url, job=job)
    names = served_files(load(Store(url), offer.version.commit)).file_sizes()
    kinds = ("dense/", "/rows/zarr.json", "/rows/c", "/ids/c", "/arrays/rows/c")
    for name in (next(one for one in names if kind in one) for kind in kinds):
        path = Path(url, name)
        whole = path.read_bytes()
        flip_byte(path, len(whole) // 2)
        assert {finding.file for finding in check_run(url).all_findings} == {name}
        path.unlink()
        found = check_run(url).all_findings
        assert {finding.file for finding in found} == {name}
        assert f"podembed publish {run}@{offer.version.commit} --to {url} copies it again" in found[0].remedy
        again = publish(f"{run}@{offer.version.commit}", to=url, job=job)
        assert again.copied == copies.Copied(num_files=1, num_bytes=len(whole))
        assert path.read_bytes() == whole
    # Damage in the run does not get into a copy.
    flip_byte(Path(run, next(one for one in names if "/rows/c" in one)), 40)
    with pytest.raises(ChunkDamaged):
        publish(run, to=str(tmp_path / "other"), job=job)
    assert newest_pointer(Store(tmp_path / "other")) is None


class Killed(BaseException):
    pass


def test_a_publisher_that_ends_anywhere(
    small_data: str, columns: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends after each of its writes; half of a file lies there then. Each time the copy has a whole version or none."""
    job = small_job(folder=small_data, audit=False)
    run = fit_job(job, tmp_path, max_steps=4, checkpoint_config=CHECKPOINTS).path
    url = str(tmp_path / "copy")
    first = publish(run, to=url, job=job).version.name
    run = fit_job(job, tmp_path, max_steps=6, checkpoint_config=CHECKPOINTS).path
    monkeypatch.setattr(copies, "FileThreads", InTurn)
    left = 0
    write_new, create = Store.write_new, Store.create_exclusive

    def count(store: Store, name: str, data: bytes) -> None:
        nonlocal left
        if store.location == url:
            left -= 1
            if left < 0:
                if name.startswith("data/"):
                    # A killed writer may have made its name last whole but for the bytes.
                    write_new(store, name, [bytes(len(data))])
                raise Killed

    monkeypatch.setattr(
        Store, "write_new", lambda store, name, data: count(store, name, b"".join(data)) or write_new(store, name, data)
    )
    monkeypatch.setattr(
        Store, "create_exclusive", lambda store, name, data: count(store, name, data) or create(store, name, data)
    )
    for writes in (1, 2, 9, *range(2, 15), 1000):
        left = writes
        try:
            offer = publish(run, to=url, job=job)
        except Killed:
            left = 1000
        pointer = newest_pointer(Store(url))
        assert pointer is not None
        assert check_run(url).is_intact
        if pointer.version != first:
            break
    assert offer.version.name == pointer.version
    assert publish(run, job=job).version.name == pointer.version
    assert answers(Store(url), columns) == answers(Store(run), columns)


class InTurn:
    """`FileThreads` without threads."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, job: Any) -> None:
        job()

    def writes(self) -> InTurn:
        return self

    def finish(self) -> None:
        pass


def test_nothing_is_deleted_beside_another_publisher(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False)
    run = fit_job(job, tmp_path, max_steps=6, checkpoint_config=CHECKPOINTS).path
    url = str(tmp_path / "copy")
    target = Store(url)
    for at, name in enumerate(sorted(read_commit_names(Store(run)))):
        if at == 1:
            held = hold(target, name, reason="of another publisher", unix_s=1e10, seconds=1e3)
        publish(run, to=url, commit=name, job=job, keep=1)
    assert len(read_commit_names(target)) == 2
    target.delete(held)
    publish(run, to=url, job=job, keep=1)
    assert len(read_commit_names(target)) == 1
    assert check_run(url).is_intact


@pytest.mark.parametrize(("rows", "min_count", "largest"), [("bfloat16", 0, 2**-8), ("int8", 3, 0.02)])
def test_rows_of_another_form(small_data: str, tmp_path: Path, rows: str, min_count: int, largest: float) -> None:
    """Deltas and all: servers have what the run's rows become, and a version has the scores of its probe."""
    job = small_job(folder=small_data, audit=False, dynamic=bool(min_count))
    url = str(tmp_path / "copy")
    target = Store(url)
    follower = Replica(target)
    form = RowForm(rows=rows, min_count=min_count)
    options = {"to": url, "job": job, "rows": rows, "min_count": min_count}
    run = ""
    for steps in (4, 6, 7):
        run = fit_job(job, tmp_path, max_steps=steps, checkpoint_config=CHECKPOINTS).path
        offer = publish(run, **options)
        assert follower.follow(), follower.error
        current = follower.current
        assert current is not None
        assert current.has_same_bits
        with_commit(run, lambda model, current=current: _same_rows(model, current, form), job=job)
        assert offer.copied is not None
        assert offer.copied.error is not None
        assert 0 < offer.copied.error.largest <= largest
        assert (offer.copied.error.num_left_out > 0) == (min_count > 0)
        assert publish(run, job=job).version.name != offer.version.name
    # What is there is used again.
    again = publish(run, **options).copied
    assert again is not None
    assert again.num_files == 0
    assert check_run(url).is_intact
    with pytest.raises(ConfigurationError, match=r"Found a copy with --rows .* Expected --rows float32 --min-count 0"):
        publish(run, to=url, job=job)
    with pytest.raises(ConfigurationError, match="without --to"):
        publish(run, job=job, rows="int8")
    # Damage is repaired.
    name = next(name for name in load(target, offer.version.commit).file_sizes() if "/rows/c" in name)
    whole = Path(url, name).read_bytes()
    flip_byte(Path(url, name), 7)
    assert not check_run(url).is_intact
    Path(url, name).unlink()
    publish(run, **options)
    assert Path(url, name).read_bytes() == whole


def _same_rows(model: CommittedModel, current: ServedVersion, form: RowForm) -> None:
    expected = CommittedRows(model, form=form)
    for at, (files, spec) in enumerate(zip(model.tables, model.specs, strict=True)):
        ids = np.arange(files.num_rows, dtype=np.int64)
        if isinstance(spec.keys, DynamicKeys):
            known = CommittedRows(model).keys(at)
            ids = np.concatenate([known, np.arange(50)])
            assert current.tables[spec.name].num_held == len(expected.keys(at))
        assert current.tables[spec.name].values(ids).tobytes() == expected.rows(at, ids).tobytes()


def test_the_change_of_figures(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False, evaluate=True)
    run = fit_job(job, tmp_path, max_steps=4).path
    copied = publish(run, to=tmp_path / "copy", rows="int8", job=job).copied
    assert copied is not None
    before, after = copied.figures["AUC"]
    assert before != after
    assert abs(before - after) < 0.05
    text = "\n".join(copies.described(copied, "copy"))
    assert "of its length, in table" in text
    assert "AUC 0." in text
    with pytest.raises(ConfigurationError, match="no table with a capacity"):
        publish(run, to=tmp_path / "other", min_count=2, job=job)
    copied = publish(run, to=tmp_path / "other", rows="bfloat16", job=job, measures=False).copied
    assert copied is not None
    assert "the change of AUC was not measured: it was not asked for" in copies.described(copied, "other")


def test_rows_as_int8() -> None:
    form = RowForm(rows="int8")
    values = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    values[:3] = [[0.0] * 16, [1e-44] * 16, [3e38] * 16]
    made = form.encoded(values)
    assert [one.dtype for one in made.values()] == [np.int8, np.float32]
    found = form.served(values)
    assert (np.abs(found - values) <= np.abs(values).max(axis=1, keepdims=True) / 254 * 1.00001 + 1e-44).all()
    assert np.isfinite(found).all()
