"""Files of a run that are removed behind its driver's back while it trains: it ends at the next commit, or says what is
gone and goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from podembed.jobs.outcomes import EXIT_CONFIGURATION, exit_code
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.lease import Fenced
from podembed.orchestrator.commit.lease_files import read_claims, read_lineage
from podembed.orchestrator.commit.vanished import RunVanished
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.tools.fsck.check import check_run
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from tests.orchestrator.cluster.test_in_process import STEPS, train
from tests.orchestrator.commit.checkpoint_samples import commit_steps, holder, take
from tests.orchestrator.committed_tables import flip_byte

FIRST, SECOND, LAST = "s000000010-g00000001", "s000000020-g00000001", f"s{STEPS:09d}-g00000001"


class Remover(SilentReporter):
    """Does something to the run when a commit has been acknowledged, and remembers what it was told."""

    def __init__(self, at: str, act: Callable[[], object]) -> None:
        self._at, self._act = at, act
        self.notices: list[str] = []
        self.commits: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self.commits.append(name)
        if name == self._at:
            self._act()

    def said(self, *words: str) -> list[str]:
        return [text for text in self.notices if all(word in text for word in words)]


def disturbed(
    data: str, path: Path, at: str, act: Callable[[], object], *, full_every: int = 1
) -> tuple[Remover, Result]:
    reporter = Remover(at, act)
    policy = CheckpointConfig(every_steps=10, num_to_keep=None, full_every=full_every)
    return reporter, train(data, path, reporter=reporter, checkpoint_config=policy)


class TestTheRunEnds:
    @pytest.mark.parametrize("what", ["", "lease", "lease/g00000001.claim", "lease/g00000001.base.json"])
    def test_without_its_folder_its_claim_or_its_base(self, small_data: str, tmp_path: Path, what: str) -> None:
        path = tmp_path / "run"

        def remove() -> None:
            gone = path / what
            gone.unlink() if gone.is_file() else shutil.rmtree(gone)

        with pytest.raises(RunVanished) as caught:
            disturbed(small_data, path, FIRST, remove)
        text = str(caught.value)
        assert "lease/g00000001." in text
        assert "resume" in text
        assert ("left nothing" in text) == (what == "" and not (path / "data").exists())
        assert not [*path.glob(f"commit/{SECOND}*")], "what cannot be resumed is not committed"

    def test_with_the_code_that_nobody_tries_again(self, capsys: pytest.CaptureFixture[str]) -> None:
        def command() -> int:
            raise RunVanished("lease/g00000001.claim", "no file", Store("memory://nowhere"))

        assert exit_code(command) == EXIT_CONFIGURATION
        assert "Nothing more is committed there" in capsys.readouterr().err

    def test_where_another_run_was_begun_in_its_place(self, small_data: str, tmp_path: Path) -> None:
        path = tmp_path / "run"

        def replace() -> None:
            shutil.rmtree(path)
            take(Store(path), "somebody else")

        with pytest.raises(RunVanished, match="a file of another driver at 'lease/g00000001.claim'"):
            disturbed(small_data, path, FIRST, replace)

    def test_if_its_last_commit_is_removed_before_it_has_ended(self, small_data: str, tmp_path: Path) -> None:
        path = tmp_path / "run"
        with pytest.raises(RunVanished, match=f"no file at 'commit/{LAST}.json'"):
            disturbed(small_data, path, LAST, (path / "commit" / f"{LAST}.json").unlink)

    def test_on_an_object_store_as_in_a_folder(self) -> None:
        store = Store("memory://vanished-lease")
        lease = take(store)
        commit_steps(store, lease, 10)
        store.delete("lease/g00000001.claim")
        with pytest.raises(RunVanished, match="left lease, commit, data, with 1 manifests"):
            commit_steps(store, lease, 20)
        assert [*store.children("commit")] == [f"{FIRST}.json"]


class TestTheRunGoesOn:
    def test_where_data_is_gone_and_the_next_commit_is_whole(self, small_data: str, tmp_path: Path) -> None:
        path = tmp_path / "run"
        reporter, result = disturbed(small_data, path, FIRST, lambda: shutil.rmtree(path / "data"))
        assert reporter.said("files of commit", FIRST, "VANISHED", "data/")
        assert result.commit == LAST
        store = Store(path)
        assert not [*checkpoint.size_damages(store, checkpoint.load(store, SECOND))]

    def test_where_a_delta_has_lost_what_it_rests_on_all_rows_are_written_again(
        self, small_data: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "run"
        reporter, result = disturbed(
            small_data, path, FIRST, lambda: shutil.rmtree(path / "data" / FIRST), full_every=10
        )
        assert reporter.said("files of commit", FIRST, "VANISHED")
        assert reporter.said("SAVE FAILED at step 20", "writes all rows")
        head = checkpoint.load_head(Store(path))
        assert head is not None
        assert (head.name, head.num_deltas, result.failed_saves) == (LAST, 0, 1)
        assert not [*checkpoint.content_damages(Store(path), head)]

    @pytest.mark.parametrize("full_every", [1, 10])
    def test_where_a_manifest_is_gone(self, small_data: str, tmp_path: Path, full_every: int) -> None:
        """A manifest names all that it needs, so the next commit stands without the one before, also as a delta."""
        path = tmp_path / "run"
        gone = path / "commit" / f"{FIRST}.json"
        reporter, result = disturbed(small_data, path, FIRST, gone.unlink, full_every=full_every)
        assert len(reporter.said(FIRST, "VANISHED", "next commit is whole without it")) == 1
        assert result.commit == LAST
        assert [commit.name for commit in check_run(path.as_posix()).commits if not commit.findings] == [LAST, SECOND]

    def test_where_an_older_manifest_is_gone(self, small_data: str, tmp_path: Path) -> None:
        path = tmp_path / "run"
        gone = path / "commit" / f"{FIRST}.json"
        reporter, _ = disturbed(small_data, path, SECOND, gone.unlink)
        assert len(reporter.said(FIRST, "VANISHED")) == 1
        assert not reporter.said(SECOND, "VANISHED")

    @pytest.mark.parametrize("how", ["removed", "damaged"])
    def test_with_the_record_of_the_run_written_again(self, small_data: str, tmp_path: Path, how: str) -> None:
        record = tmp_path / "run" / "RUN.json"
        before: list[bytes] = []

        def spoil() -> None:
            before.append(record.read_bytes())
            record.unlink() if how == "removed" else flip_byte(record, 30)

        reporter, _ = disturbed(small_data, tmp_path / "run", FIRST, spoil)
        assert record.read_bytes() == before[0]
        assert reporter.said(f"RUN.json had been {how}")

    def test_and_says_nothing_where_nothing_is_gone(self, small_data: str, tmp_path: Path) -> None:
        reporter, _ = disturbed(small_data, tmp_path / "run", FIRST, lambda: None)
        assert not reporter.said("VANISHED")

    def test_where_a_listing_is_old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a listing does not show yet is there under its name."""
        store = Store(tmp_path)
        lease = take(store)
        commit_steps(store, lease, 10)
        monkeypatch.setattr(Store, "children", lambda self, prefix="": [])
        lease.check()
        commit_steps(store, lease, 20)
        assert lease.head == SECOND


class TestTheNextGeneration:
    def test_a_driver_does_not_begin_again_in_an_empty_folder(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "run")
        lease = take(store)
        commit_steps(store, lease, 10)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunVanished):
            acquire(store, holder=holder(), held=lease.generation, held_files=lease.own_files)
        assert not (tmp_path / "run" / "commit").exists()

    def test_a_run_without_its_leases_begins_nothing_until_it_is_allowed(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "run")
        commit_steps(store, take(store), 10)
        commit_steps(store, take(store), 20)
        shutil.rmtree(tmp_path / "run" / "lease")
        with pytest.raises(StorageError, match="lease/g00000002.base.json.*no file.*--allow-ancestor"):
            acquire(store, holder=holder())
        lease = acquire(store, holder=holder(), rebuild=True)
        # No generation is used twice, also where nothing says that it was claimed.
        assert lease.generation > 2
        assert lease.head == "s000000020-g00000002"
        assert read_lineage(store) == ("s000000020-g00000002", FIRST)

    def test_the_driver_that_lost_them_is_fenced_by_the_next(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "run")
        old = take(store)
        commit_steps(store, old, 10)
        shutil.rmtree(tmp_path / "run" / "lease")
        acquire(store, holder=holder(), rebuild=True)
        with pytest.raises(Fenced):
            commit_steps(store, old, 20)
        assert max(read_claims(store)) > 1


class TestBases:
    def test_an_older_one_that_is_damaged_is_told_by_its_first_commit(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        for step in (10, 20, 30):
            commit_steps(store, take(store), step)
        before = read_lineage(store)
        flip_byte(tmp_path / "lease" / "g00000002.base.json", 20)
        assert read_lineage(store) == before
        assert take(store).head == before[0]

    def test_where_nothing_tells_an_older_one_the_lineage_ends_and_nothing_is_deleted(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        for steps in ((10,), (20, 25), (30,)):
            commit_steps(store, take(store), *steps)
        store.delete("commit/s000000020-g00000002.json")
        store.delete("lease/g00000002.base.json")
        assert read_lineage(store) == ("s000000030-g00000003", "s000000025-g00000002")
        with pytest.raises(StorageError, match=r"lease/g00000002.base.json"):
            read_lineage(store, whole=True)

    def test_the_newest_one_without_commits_is_passed_over_where_that_is_allowed(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        commit_steps(store, take(store), 10)
        take(store)
        flip_byte(tmp_path / "lease" / "g00000002.base.json", 20)
        with pytest.raises(StorageError, match=r"g00000002.base.json.*--allow-ancestor"):
            take(store)
        assert take(store, rebuild=True).head == FIRST
        # From then on nothing depends on the damaged one.
        assert read_lineage(store) == (FIRST,)
        assert take(store).head == FIRST
