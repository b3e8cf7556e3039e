"""`RayJobRunner` on a real cluster with a dashboard: exit codes and output of submitted jobs, a stop, and a cluster
that is not there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podembed.jobs.supervise.ray_jobs import RayJobRunner
from podembed.orchestrator.api.config import ConfigurationError
from tests.dashboard import cluster_for_jobs

END_S = 900


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Address of a cluster of its own, which ends with the module."""
    with cluster_for_jobs(Path(sys.executable)) as address:
        yield address


def runner_of(address: str, folder: Path, notices: list[str]) -> RayJobRunner:
    (folder / "podembed").mkdir(exist_ok=True)
    (folder / "podembed" / "__init__.py").touch()
    # What is submitted is `python -m podembed`; this one stands in for a training that takes its time.
    (folder / "podembed" / "__main__.py").write_text(
        "import signal, sys, time\n"
        "print('arguments', sys.argv[1:], flush=True)\n"
        "if sys.argv[1] == 'wait':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (print('told to stop', flush=True), sys.exit(85)))\n"
        "    time.sleep(120)\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    return RayJobRunner(
        address=address, working_dir=str(folder), name=f"test-{folder.name}", notice=notices.append, patience_s=30.0
    )


def await_end(runner: RayJobRunner) -> int:
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        if (code := runner.poll()) is not None:
            return code
        time.sleep(0.1)
    raise TimeoutError(f"The job did not end within {END_S} s.")


@pytest.mark.ray
@pytest.mark.slow
def test_codes_and_output_of_jobs_come_back(dashboard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notices: list[str] = []
    runner = runner_of(dashboard, tmp_path, notices)
    for attempt, code in enumerate((88, 0), 1):
        runner.start(["train", str(code), "a b"], attempt)
        assert await_end(runner) == code
    printed = capsys.readouterr().out
    assert "arguments ['train', '88', 'a b']" in printed
    assert "arguments ['train', '0', 'a b']" in printed
    # On a busy machine there is also one that the cluster is waited for.
    submitted = [notice.split(":")[0] for notice in notices if notice.startswith("submitted ")]
    assert submitted == [f"submitted test-{tmp_path.name}-a{at}" for at in (1, 2)]


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_is_asked_to_stop_and_given_time(
    dashboard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = runner_of(dashboard, tmp_path, [])
    runner.start(["wait"], 1)
    printed, deadline = "", time.monotonic() + END_S
    while "arguments" not in printed and time.monotonic() < deadline:
        assert runner.poll() is None
        printed += capsys.readouterr().out
        time.sleep(0.1)
    runner.stop()
    assert await_end(runner) != 0
    assert "told to stop" in capsys.readouterr().out


def test_no_cluster_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Found no Ray cluster at http://127.0.0.1:1"):
        runner_of("http://127.0.0.1:1", tmp_path, [])
