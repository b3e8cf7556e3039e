"""What `resume` says before it starts: the placement that the run will have."""

from __future__ import annotations

from pathlib import Path

import pytest

from podembed.jobs.cli.fitting import introduce
from podembed.jobs.fitting import fit
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.decisions.table_plan import summary
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.group.generation_plan import plan_generation
from podembed.orchestrator.planning.recorded import planned
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.workers.job.reference import JobReference
from tests.jobs.cli.test_main import run
from tests.small_job import NUM_LANES, write_small_data


class Kept(SilentReporter):
    """Keeps notices."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_more_hosts_than_lanes_are_refused_alike(command: str, small_data: str, tmp_path: Path) -> None:
    job = ["--job", "tests.small_job:small_job", "--set", f"folder={small_data}"]
    place = ["--storage", str(tmp_path)] if command == "train" else []
    code, out, err = run(command, *job, *place, "--hosts", str(NUM_LANES + 1))
    assert code == 87
    # `train` says from the first moment on what it does.
    assert [line.split()[2:4] for line in out.splitlines()] == [["loading", "the"]] * (command == "train")
    assert f"Found {NUM_LANES + 1} hosts for the {NUM_LANES} lanes of job 'small'" in err
    if command == "plan":
        assert run(command, *job, "--hosts", str(NUM_LANES))[0] == 0
        reference = JobReference(function="tests.small_job:small_job", arguments={"folder": small_data})
        url = create_run(str(tmp_path / "run"), reference.resolve(), reference).url
        assert run("plan", url, "--hosts", str(NUM_LANES))[0] == 0
        code, _, err = run("plan", url, "--hosts", str(NUM_LANES + 1))
        assert (code, "lanes of job 'small'" in err) == (87, True)


def test_resume_says_the_placement_that_hosts_will_have(tmp_path: Path) -> None:
    """Not that of a new run: what hosts hold already stays with them."""
    write_small_data(tmp_path / "data")
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": str(tmp_path / "data")})
    url = str(tmp_path / "run")
    config = RunConfig(name="run", max_steps=2)
    run = create_run(url, reference.resolve(), reference)
    fit(run, scaling=ScalingConfig(in_process=True), config=config, reporter=SilentReporter())
    again = open_run(url)
    base = again.newest_commit()
    assert base is not None
    real = plan_generation(again, config, 2, base, base.placement, num_hosts=3).placement
    found = planned(again, base, num_hosts=3)
    for table in found.tables:
        assert table.hosts == tuple(sorted(set(real[table.spec.name])))
    kept = Kept()
    introduce(again, ScalingConfig(num_hosts=3), kept)
    assert summary(found) in kept.notices
    assert summary(found) != summary(planned(again, None, num_hosts=3))
    introduce(again, ScalingConfig(num_hosts=(3, 5)), kept)
    assert f"{summary(found)} (on 3 hosts)" in kept.notices


def test_plan_says_where_tables_without_a_place_lie_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    job = ["--job", "tests.tools.preflight.odd_jobs:linear", "--set", "place=auto", "rows=50000000"]
    code, out, _ = run("plan", *job)
    assert code == 0
    assert "place='auto', and devices are CPUs; within a host's fair share" in out
    code, out, _ = run("plan", *job, "--topology", "2x2", "--accelerator-type", "TPU-V6E")
    assert code == 0
    assert "place='auto': 12,219 MiB on each of 4 x TPU-V6E, where 16,384 MiB are left for tables; each holds" in out
    assert "place='auto': 12,219 MiB on each of 4 x TPU-V6E, where 4,166 MiB are left for tables; within a" in out
