"""Ctrl-C twice in the middle of a commit: the program leaves at once, and what it leaves is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from podembed.jobs.outcomes import EXIT_INTERRUPTED
from podembed.orchestrator.commit.holder import read_heartbeat
from podembed.orchestrator.commit.lease_files import read_commit_names, read_head
from podembed.workers.storage.store import Store
from tests.faults.interrupted_process import HANGS_S
from tests.jobs.cli.test_main import run
from tests.long_tests import is_long, long_case
from tests.run_state import assert_same_bytes, committed_state

ROOT = Path(__file__).parents[2]
NUM_STEPS = 30


def arguments(data: str, storage: Path, name: str) -> list[str]:
    return [
        *("train", "--job", "tests.small_job:small_job", "--set", f"folder={data}", "--in-process"),
        *("--storage", str(storage), "--name", name, "--checkpoint-every", "5", "--max-steps", str(NUM_STEPS)),
    ]


@pytest.fixture(scope="module")
def undisturbed(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    storage = tmp_path_factory.mktemp("runs")
    code, _, err = run(*arguments(small_data, storage, "undisturbed"))
    assert code == 0, err
    return str(storage / "undisturbed")


@pytest.mark.parametrize(
    ("moment", "num_commits"), [pytest.param("before", 2, marks=is_long), ("after", 2), long_case("hung", 1)]
)
def test_what_is_left_is_whole_and_goes_on_to_the_same_bytes(
    moment: str, num_commits: int, undisturbed: str, small_data: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.interrupted_process", moment, *arguments(small_data, tmp_path, "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == EXIT_INTERRUPTED, done.stderr[-2000:]
    assert "What was committed stands" in done.stderr
    url = str(tmp_path / "run")
    store = Store(url)
    assert len(read_commit_names(store)) == num_commits, "the commit that was being published is there, and no other"
    assert (read_head(store) or "").startswith(f"s{5 * num_commits:09d}")
    assert ("left while the storage had not answered" in done.stdout) == (moment == "hung")
    assert read_heartbeat(store, 1) is None, "the next driver has to wait for nobody"
    code, out, _ = run("fsck", url)
    assert code == 0, out
    code, out, err = run("resume", url, "--in-process", "--max-steps", str(NUM_STEPS))
    assert code == 0, err
    assert_same_bytes(committed_state(url), committed_state(undisturbed))
