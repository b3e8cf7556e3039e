"""`podembed check-device`, rehearsed on CPU devices."""

from __future__ import annotations

import getpass
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podembed.jobs.check_device import answers, checks, command
from podembed.jobs.check_device.findings import MEASURED
from podembed.jobs.check_device.jobs import NO_DATA
from podembed.jobs.cli.main import main
from podembed.tools.preflight.compiling import compile_for
from podembed.tools.preflight.slices import parse_slice
from podembed.workers.job.reference import JobReference
from tests.long_tests import is_long
from tests.tools.preflight.test_compile import needs_libtpu

ROOT = Path(__file__).parents[3]
FOUR = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def check(out: Path, *arguments: str) -> tuple[int | str | None, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main(["check-device", "--out", str(out), *arguments])
    text = out.read_text(encoding="utf-8")
    names = {platform.node(), getpass.getuser(), str(out.parent), str(ROOT)}
    assert [name for name in names if name in text] == []
    return ended.value.code, json.loads(text)


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FOUR.items():
        monkeypatch.setenv(name, value)


def test_wrong_devices_are_found_and_the_rest_goes_on(
    tmp_path: Path, four: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "CHILD", "tests.jobs.check_device.wrong_process")
    code, report = check(tmp_path / "report.json", "--only", "bits", "pieces", "two_towers", "bound")
    found = {one["check"]: one for one in report["checks"]}
    assert code == command.EXIT_DIFFERS
    assert report["devices"]["count"] == 4
    states = {name: one["state"] for name, one in found.items()}
    assert states == {"bits": "agrees", "pieces": "FAILED", "two_towers": "DIFFERS", "bound": "not run"}
    assert found["pieces"]["sentence"] == "RuntimeError: Found no room in <path> at <address>. Expected some."
    assert found["two_towers"]["figures"]["relative"] > found["two_towers"]["figures"]["tolerance"] > 0
    page = capsys.readouterr().out
    assert "4 x cpu" in page
    assert [name for name in found if name not in page] == []


def test_what_the_budget_leaves_no_time_for_is_listed(tmp_path: Path) -> None:
    code, report = check(tmp_path / "report.json", "--minutes", "0")
    assert code == 0
    assert [(one["check"], one["state"]) for one in report["checks"]] == [(name, "not run") for name in checks.NAMES]


def test_a_check_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check-device", "--out", str(tmp_path / "report.json"), "--only", "dlmr"])
    assert "Found --only 'dlmr'. Expected the beginning of one of bits, dlrm," in capsys.readouterr().err


@is_long
def test_cpu_devices_agree_with_a_cpu_and_recover(tmp_path: Path, four: None) -> None:
    code, report = check(tmp_path / "report.json", "--minutes", "60")
    states = {one["check"]: one["state"] for one in report["checks"]}
    assert (code, states.pop("bound"), states.pop("copies"), states.pop("steps")) == (0, "not run", *["measured"] * 2)
    assert set(states.values()) == {"agrees"}


@is_long
def test_a_process_that_dies_is_followed_by_another(
    tmp_path: Path, four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "CHILD", "tests.jobs.check_device.wrong_process")
    _, report = check(tmp_path / "report.json", "--only", "deepfm", "two_towers")
    died, after = report["checks"]
    assert died["state"] == "FAILED"
    assert "the process ended with -6" in died["sentence"]
    assert after["state"] == "DIFFERS"


@is_long
@needs_libtpu
@pytest.mark.parametrize(
    ("kind", "count", "topology"),
    [("TPU v6 lite", 4, "v6e:2x2"), ("TPU v5", 4, "v5p:2x2x1"), ("TPU7x", 8, "tpu7x:2x2x1")],
)
def test_a_step_stands_beside_its_bound(kind: str, count: int, topology: str) -> None:
    checking = checks.Checking("unread", os.environ, lambda: 600.0)
    checking.devices.update(kind=kind, count=count)
    checking._steps = {"512": {"ms": 3.0}, "64": {"ms": 1.0}}
    found = checking._bound()
    assert (found.state, found.figures["topology"], found.figures["samples"]) == (MEASURED, topology, 512)
    assert found.figures["times"] == pytest.approx(3.0 / found.figures["bound_ms"], rel=0.05)


@is_long
@needs_libtpu
@pytest.mark.parametrize(("model", "place"), [("tables", "sharded"), ("sasrec", "sharded"), ("hstu", "host")])
def test_programs_that_a_tpu_shall_run_compile_for_one(model: str, place: str) -> None:
    arguments = {"rows": NO_DATA, "model": model, "place": place}
    job = JobReference(function="podembed.jobs.check_device.jobs:check_job", arguments=arguments)
    (account,) = compile_for(job, [parse_slice("v6e:2x2")], environ=os.environ)
    assert account.failures == {}
    assert {program.name.split()[0] for program in account.programs} == {"forward", "train"}


@is_long
def test_an_interrupt_leaves_a_report_of_what_there_is(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    line = [sys.executable, "-m", "podembed", "check-device", "--out", str(out), "--only", "bits", "dlrm", "tables"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **FOUR})
    assert process.stderr is not None
    assert process.stderr.readline() == "bits: agrees\n"
    # Shells let programs in the background ignore Ctrl-C.
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == command.EXIT_INTERRUPTED
    first, *others = json.loads(out.read_text(encoding="utf-8"))["checks"]
    assert first["state"] == "agrees"
    assert {(one["state"], one["sentence"]) for one in others} == {("not run", "interrupted")}
