"""The short form of `podembed chaos`: real processes are killed, and the end is that of a run that was left alone.

`make test` has it in one process. Kills on two hosts take two clusters, so they are long tests. There
tests/orchestrator/driver/test_equality.py and tests/faults/network/test_node_loss.py stand for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.cli.test_main import run
from tests.long_tests import is_long

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1500
# On two hosts, with the kills in each: a host and another device at once. Then in the middle of a table's update,
# between two tables, and after a step.
ON_HOSTS = [("F2.1", 2), ("F1.4", 3)]
# In one process: in the middle of a shard file; NaN right before a commit.
IN_PROCESS = "F6.3,F26.2"
# A write that is torn, as in tests/orchestrator/commit/test_checkpoint.py; the driver before it acknowledges; an
# answer that is lost.
MORE_IN_PROCESS = "F6.9,F16.3,F19.1"


def chaos(folder: Path, *arguments: str) -> tuple[int, dict, str]:
    """Exit code, last line and all output of the command."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "podembed", "chaos", "--folder", str(folder / "runs"), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout


def check(told: dict, output: str) -> None:
    assert told["is_met"], output
    assert told["processes_left"] == 0
    for found in told["rounds"]:
        assert found["struck"] >= 1, output
        assert False not in found["oracles"].values(), output


@is_long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "kills"), ON_HOSTS)
def test_a_run_whose_hosts_are_killed_ends_as_if_nothing_had_happened(
    tmp_path: Path, schedule: str, kills: int
) -> None:
    code, told, output = chaos(
        tmp_path, "--only", schedule, "--set", f"folder={tmp_path / 'data'}", "--detect-s", "300", "--recover-s", "600"
    )
    assert code == 0, output
    check(told, output)
    (found,) = told["rounds"]
    assert found["struck"] == kills
    assert all(found["oracles"][oracle] for oracle in ("O1", "O2", "O3", "O4", "O5", "O6")), output


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [IN_PROCESS, pytest.param(MORE_IN_PROCESS, marks=is_long)])
def test_commits_survive_kills_and_failing_storage(tmp_path: Path, schedules: str) -> None:
    arguments = ("--in-process", "--only", schedules, "--set", f"folder={tmp_path / 'data'}")
    code, told, output = chaos(tmp_path, *arguments, "--detect-s", "300", "--recover-s", "600")
    assert code == 0, output
    check(told, output)
    assert [found["label"] for found in told["rounds"]] == schedules.split(",")
    assert all(found["oracles"]["O1"] for found in told["rounds"]), output


@pytest.mark.parametrize("selection", ["F99", "G1", "F6.77"])
def test_what_cannot_be_selected_is_refused(selection: str) -> None:
    code, _, err = run("chaos", "--only", selection)
    assert code == 87, err
    assert "Expected" in err


def test_the_list_says_what_each_schedule_does() -> None:
    code, out, err = run("chaos", "--list", "--only", "F6", "--rounds", "2")
    assert code == 0, err
    assert "F6.3" in out
    assert "kill_midway at storage.write" in out
    assert "seed 2 " in out
