"""Every file of a run, each with some of its bits flipped: `fsck` finds it and says what to do, or nothing that goes on
with the run reads it.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.run.opening import open_run
from podembed.orchestrator.run.run import OpenRun
from podembed.tools.fsck.check import check_run
from podembed.tools.fsck.report import render
from podembed.workers.storage.store import Store
from tests.long_tests import long_case
from tests.orchestrator.cluster.test_in_process import train
from tests.orchestrator.run.claims_of import claims_of

DATA_FILES = 8  # of some hundred, each of which the check reads as the others of its kind
# What nobody reads that goes on with a run: heartbeats are advice that may be torn, malformed rows are for people.
UNREAD = (".hb",)
FOLDERS = {"RUN.json", "INPUT.json", "lease", "policies", "input", "data", "commit"}


POLICY = CheckpointConfig(every_steps=4, num_to_keep=4, full_every=3)


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations, full commits and deltas, a change of the data files that was accepted, and recorded policies."""
    path = tmp_path_factory.mktemp("flips") / "run"
    data = shutil.copytree(small_data, path.parent / "data")
    train(str(data), path, max_steps=8, checkpoint_config=POLICY)
    for file in data.glob("*.parquet"):
        file.touch()
    run = open_run(str(path), accept_input_change=True)
    claims_of(run, policies=POLICY).acquire().release()
    train(str(data), path, max_steps=12, checkpoint_config=POLICY)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def reopened(path: Path, **options: bool) -> OpenRun:
    run = open_run(str(path), **options)
    claims_of(run, policies=POLICY).acquire().release()
    return run


@pytest.mark.parametrize("flips_a_file", [1, long_case(3)])
def test_every_flipped_bit_is_found(run: Path, flips_a_file: int) -> None:
    assert check_run(str(run)).is_intact
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    assert {path.relative_to(run).parts[0] for path in files} >= FOLDERS
    chance = random.Random(5)
    data = [path for path in files if path.is_relative_to(run / "data")]
    for path in [*(path for path in files if path not in data), *chance.sample(data, DATA_FILES)]:
        name, whole = path.relative_to(run).as_posix(), path.read_bytes()
        if name.endswith(UNREAD):
            continue
        for _ in range(1 if path in data else flips_a_file):
            at, bit = chance.randrange(len(whole)), chance.randrange(8)
            flip(path, at, bit)
            found = check_run(str(run)).all_findings
            assert name in {finding.file for finding in found}, f"bit {bit} of byte {at} of {name}"
            assert all(finding.remedy for finding in found), name
            path.write_bytes(whole)
    assert check_run(str(run)).is_intact


class TestWhatIsOnlyAdvice:
    """Nothing of it stops a run: it is said, and the run goes on from the same commit."""

    @pytest.mark.parametrize(
        "name",
        ["policies/g00000001.json", "lease/g00000001.claim", "lease/g00000003.claim", "lease/g00000002.base.json"],
    )
    def test_it_is_ignored(self, run: Path, name: str) -> None:
        before = read_lineage(Store(run))
        flip(run / name, 30, 2)
        (finding,) = check_run(str(run)).all_findings
        assert finding.file == name
        assert any(words in finding.remedy for words in ("goes on without it", "it is advice"))
        reopened(run)
        assert read_lineage(Store(run)) == before

    def test_the_record_of_the_data_files_is_said_ignored_and_written_again(
        self, small_data: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "run"
        train(small_data, path, max_steps=4)
        whole = (path / "INPUT.json").read_bytes()
        flip(path / "INPUT.json", 100, 1)
        assert "INPUT.json" in render(check_run(str(path)))
        told: list[str] = []
        run = open_run(str(path))
        claims_of(run, told=told).acquire().release()
        assert any("INPUT.json was damaged or gone; it was written again" in text for text in told)
        assert (path / "INPUT.json").read_bytes() == whole
        assert check_run(str(path)).is_intact

    def test_as_a_record_that_is_torn_to_nothing(self, small_data: str, tmp_path: Path) -> None:
        path = tmp_path / "run"
        train(small_data, path, max_steps=4)
        (path / "INPUT.json").write_bytes(b"")
        reopened(path)
        assert check_run(str(path)).is_intact


class TestRemedies:
    """What `fsck` says to do works."""

    def test_of_the_newest_base(self, run: Path) -> None:
        before = read_lineage(Store(run))
        flip(run / "lease" / "g00000003.base.json", 20, 0)
        assert "resume" in render(check_run(str(run)))
        assert "--allow-ancestor" in render(check_run(str(run)))
        with pytest.raises(Exception, match="--allow-ancestor"):
            reopened(run)
        reopened(run, allow_ancestor=True)
        assert read_lineage(Store(run)) == before
        reopened(run)

    def test_of_the_record_of_files_that_were_accepted_last(self, run: Path) -> None:
        flip(run / "input" / "change-00001.json", 40, 3)
        (finding,) = check_run(str(run)).all_findings
        assert "--accept-input-change" in finding.remedy
        with pytest.raises(Exception, match=r"change-00001.json.*--accept-input-change"):
            reopened(run)
        reopened(run, accept_input_change=True)
        reopened(run)

    def test_of_the_newest_commit(self, run: Path) -> None:
        newest, before = read_lineage(Store(run))[:2]
        flip(run / "commit" / f"{newest}.json", 50, 6)
        (finding,) = [finding for finding in check_run(str(run)).all_findings if finding.commit == newest]
        assert f"go back to {before}" in finding.remedy
        reopened(run, allow_ancestor=True)
        assert read_lineage(Store(run))[0] == before

    def test_of_an_index_behind_good_rows(
        self, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is lost: the run goes on from the same commit, and the next full commit has new files."""
        monkeypatch.setattr("podembed.orchestrator.run.opening.choose_buckets", lambda job: (1, 64, 4))
        run, policy = tmp_path / "run", CheckpointConfig(every_steps=4)
        train(small_data, run, max_steps=8, checkpoint_config=policy)
        head = read_lineage(Store(run))[0]
        chunks = [chunk for table in checkpoint.load(Store(run), head).tables for chunk in table.chunks]
        file = next(chunk.name for chunk in chunks if len(chunk.crc32c) > 1)
        flip(run / file, -1, 0)
        (finding,) = check_run(str(run)).all_findings
        assert finding.file == file
        assert "a run goes on without the index" in finding.remedy
        reopened(run, allow_ancestor=True)
        assert read_lineage(Store(run))[0] == head
        train(small_data, run, max_steps=12, checkpoint_config=policy)
        assert check_run(str(run), commit=read_lineage(Store(run))[0]).is_intact
