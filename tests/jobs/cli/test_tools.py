"""The tools of the command line on a run that was really trained: what they print, write and exit with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import commit_file, commit_name
from podembed.workers.storage.store import Store
from tests.orchestrator.committed_tables import flip_byte
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import B_ROWS, NUM_ROWS, small_job
from tests.training import fit_job

NUM_STEPS, COMMIT_EVERY = 12, 3
COMMITS = tuple(
    commit_name(step=step, generation=1) for step in range(NUM_STEPS, 0, -COMMIT_EVERY)
)  # Newest first, as the lineage has them.


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    storage = tmp_path_factory.mktemp("tools")
    fit_job(
        small_job(folder=small_data),
        storage,
        max_steps=NUM_STEPS,
        checkpoint_config=CheckpointConfig(every_steps=COMMIT_EVERY, num_to_keep=None),
    )
    return storage / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_the_run_is_what_the_tests_take_it_for(trained: Path) -> None:
    assert read_lineage(Store(trained)) == COMMITS


class TestFsck:
    def test_a_good_run(self, podembed, trained: Path) -> None:
        code, out, _ = podembed("fsck", trained)
        assert code == 0
        assert [re.findall(rf"{name} .*", out)[0].split()[-1] for name in COMMITS] == ["intact"] * len(COMMITS)
        assert "No damage found" in out
        code, out, _ = podembed("fsck", trained, "--all")
        assert code == 0

    def test_a_flipped_byte(self, podembed, run: Path) -> None:
        file = f"data/{COMMITS[1]}/tables/b/rows/c.0.0.0"
        flip_byte(run / file, 1234)
        code, out, _ = podembed("fsck", run)
        assert code == 1
        assert file in out
        assert "table 'b', rows, bucket 0 (" in out
        assert f"needed by {COMMITS[1]}" in out
        assert podembed("fsck", run, "--commit", COMMITS[1])[0] == 1
        assert podembed("fsck", run, "--commit", COMMITS[0])[0] == 0

    def test_no_run(self, podembed, tmp_path: Path) -> None:
        code, out, err = podembed("fsck", tmp_path / "nothing")
        assert (code, out) == (87, "")
        assert "Found no run in" in err
        assert not (tmp_path / "nothing").exists()


class TestDiff:
    def test_a_commit_and_itself(self, podembed, trained: Path, run: Path) -> None:
        code, out, _ = podembed("diff", trained, f"{run}@{COMMITS[0]}")
        assert (code, "The states are equal" in out) == (0, True)

    def test_two_commits(self, podembed, trained: Path) -> None:
        code, out, _ = podembed("diff", f"{trained}@{COMMITS[1]}", trained)
        assert code == 1
        assert re.search(rf"step +{NUM_STEPS - COMMIT_EVERY} -> {NUM_STEPS}\n", out)
        # 96 samples a step, each of which counts in its own row; none comes twice within an epoch.
        assert re.search(rf"audit +rows +{96 * COMMIT_EVERY} of {NUM_ROWS:,} +1 ", out)

    def test_names_that_there_are_not(self, podembed, trained: Path) -> None:
        code, _, err = podembed("diff", trained, f"{trained}@s000000004-g00000001")
        assert code == 87
        assert "Found no commit 's000000004-g00000001'" in err


class TestExport:
    @pytest.mark.parametrize("table", ["a", "b", "bags", "audit"])
    def test_what_was_trained(self, podembed, trained: Path, tmp_path: Path, table: str) -> None:
        state = {name: values for name, values in committed_state(str(trained)).items() if name.startswith(f"{table}/")}
        out = tmp_path / "t.npy"
        code, printed, _ = podembed("export", trained, "--table", table, "--out", out)
        assert code == 0
        assert str(out) in printed
        assert_same_bytes({f"{table}/rows": np.load(out)}, {f"{table}/rows": state[f"{table}/rows"]})
        arguments = ("--format", "parquet", "--slots", "--out", tmp_path / "t.parquet")
        assert podembed("export", trained, "--table", table, *arguments)[0] == 0
        read = pq.read_table(tmp_path / "t.parquet")
        columns = {f"{table}/{name}": np.array(read[name].to_pylist(), np.float32) for name in read.column_names[1:]}
        assert_same_bytes(columns, state)

    def test_an_older_commit(self, podembed, trained: Path, tmp_path: Path) -> None:
        for at, arguments in enumerate(([trained, "--commit", COMMITS[3]], [f"{trained}@{COMMITS[3]}"], [trained])):
            assert podembed("export", *arguments, "--table", "audit", "--out", tmp_path / f"{at}.npy")[0] == 0
        older, same, newest = (np.load(tmp_path / f"{at}.npy") for at in range(3))
        np.testing.assert_array_equal(older, same)
        # A visit of a sample takes 1 off its row: see the small job.
        assert (older.sum(), newest.sum()) == (-96 * COMMIT_EVERY, -96 * NUM_STEPS)

    def test_a_file_is_replaced_only_when_forced(self, podembed, trained: Path, tmp_path: Path) -> None:
        arguments = ("export", trained, "--table", "a", "--format", "safetensors", "--out", tmp_path / "t")
        assert podembed(*arguments)[0] == 0
        code, _, err = podembed(*arguments)
        assert (code, "--force" in err) == (87, True)
        assert podembed(*arguments, "--force")[0] == 0

    def test_damage_is_told_and_leaves_nothing(self, podembed, run: Path, tmp_path: Path) -> None:
        flip_byte(run / f"data/{COMMITS[0]}/tables/a/rows/c.0.0.0")
        code, _, err = podembed("export", run, "--table", "a", "--out", tmp_path / "t.npy")
        assert code == 87
        assert "tables/a/rows/c.0.0.0" in err
        assert os.listdir(tmp_path) == ["run"]


class TestExtract:
    def test_rows_and_slots(self, podembed, trained: Path) -> None:
        state = committed_state(str(trained))
        code, out, _ = podembed("extract", trained, "b", 7, 999)
        assert code == 0
        lines = out.splitlines()
        names = [name.removeprefix("b/") for name in state if name.startswith("b/")]
        assert [line.split()[0] for line in lines] == ["b[7]", *names, "b[999]", *names]
        for row, start in ((7, 1), (999, 2 + len(names))):
            for at, name in enumerate(names):
                found = np.array(lines[start + at].split()[1:], np.float32)
                np.testing.assert_array_equal(found, state[f"b/{name}"][row])

    def test_rows_alone(self, podembed, trained: Path) -> None:
        code, out, _ = podembed("extract", trained, "b", 7, "--no-slots")
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()] == ["b[7]", "rows"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(("b", B_ROWS), f"Expected 0 to {B_ROWS - 1}"), (("c", 1), "Found no table 'c'"), (("b",), "at least one")],
    )
    def test_what_is_not_there(self, podembed, trained: Path, arguments: tuple, message: str) -> None:
        code, out, err = podembed("extract", trained, *arguments)
        assert (code, out) == (87, "")
        assert message in err


class TestPrune:
    def test_old_commits_and_leftovers_go(self, podembed, run: Path) -> None:
        before = committed_state(str(run))
        leftover = run / "data" / commit_name(step=2, generation=1) / "half"
        leftover.parent.mkdir()
        leftover.write_bytes(b"never finished")
        code, out, _ = podembed("prune", run, "--keep", 2)
        assert code == 0
        assert [f"deleted commit {name}" in out for name in COMMITS] == [False, False, True, True]
        assert "deleted attempt s000000002-g00000001" in out
        store = Store(run)
        assert read_lineage(store) == COMMITS[:2]
        assert sorted(store.children("data")) == sorted(COMMITS[:2])
        assert_same_bytes(committed_state(str(run)), before)
        assert podembed("fsck", run)[0] == 0
        code, out, _ = podembed("prune", run, "--keep", 2)
        assert (code, out) == (0, "0 files, 0 B deleted\n")

    def test_what_the_run_kept_besides_the_newest_stays_when_asked_for(self, podembed, run: Path) -> None:
        code, out, _ = podembed("prune", run, "--keep", 2, "--keep-every", 100)
        assert code == 0
        assert [f"deleted commit {name}" in out for name in COMMITS] == [False, False, True, False]
        code, out, _ = podembed("fsck", run)
        assert (code, "Left over" in out) == (0, False), "a gap that the keep policy made is no damage"
        assert podembed("prune", run, "--keep", 2, "--keep-best", -1)[0] == 87
        assert podembed("prune", run, "--keep", 2)[0] == 0
        assert read_lineage(Store(run)) == COMMITS[:2]

    def test_a_run_that_is_driven_is_left_alone(self, podembed, run: Path) -> None:
        lease = acquire(Store(run), holder=Holder.current("somebody"))
        code, _, err = podembed("prune", run, "--keep", 2)
        assert code == 87
        assert "held by submission 'somebody'" in err
        assert read_lineage(Store(run)) == COMMITS
        lease.check()
        lease.release()
        assert podembed("prune", run, "--keep", 2)[0] == 0

    def test_a_damaged_head_keeps_its_ancestors_and_no_generation_is_spent(self, podembed, run: Path) -> None:
        flip_byte(run / commit_file(COMMITS[0]), 50)
        before = sorted(os.listdir(run / "lease"))
        code, _, err = podembed("prune", run, "--keep", 2)
        assert code == 87
        assert COMMITS[0] in err
        assert len(list((run / "commit").iterdir())) == len(COMMITS)
        assert sorted(os.listdir(run / "lease")) == before

    @pytest.mark.parametrize("keep", [1, 0, -3])
    def test_at_least_two_are_kept(self, podembed, run: Path, keep: int) -> None:
        code, _, err = podembed("prune", run, "--keep", keep)
        assert code == 87
        assert "at least 2" in err
        assert read_lineage(Store(run)) == COMMITS

    def test_no_run(self, podembed, tmp_path: Path) -> None:
        assert podembed("prune", tmp_path / "nothing", "--keep", 2)[0] == 87
        assert os.listdir(tmp_path) == []


def test_the_tools_need_no_jax_and_no_ray(trained: Path) -> None:
    """They are for machines that only hold the files, and nobody waits for JAX to learn that a run is intact."""
    program = (
        "import sys\n"
        "from podembed.jobs.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    print(sorted({'jax', 'ray'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "extract", str(trained), "a", "3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
