"""`podembed top`: what it shows at 80x24, without colour and into a pipe; and when it ends."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import ConfigurationError
from podembed.tools.live.snapshot import LiveSnapshot, Watcher
from podembed.tools.live.view import screen
from podembed.tools.live.watching import LONGEST_START_S, _Lines, watch
from podembed.tools.metrics.point import Measurement, StreamLine
from podembed.workers.storage.store import Store
from tests.clock import FakeClock
from tests.long_tests import long_case
from tests.orchestrator.commit.checkpoint_samples import take
from tests.orchestrator.committed_tables import create_run, run_with, two_tables
from tests.tools.report.runs import a_fault, a_point, add_lines, an_event

NOW_UNIX_S = 2e9 + 60
ESCAPE = "\x1b"


def a_window(step: int, *, hosts: int = 2, loss: float = 0.5) -> StreamLine:
    of_hosts = [
        one
        for host in map(str, range(hosts))
        for one in (
            Measurement("phase_seconds", 0.02, {"host": host, "phase": "device"}),
            Measurement("phase_seconds", 0.05, {"host": host, "phase": "read"}),
            Measurement("waited_ratio", 0.7, {"host": host, "source": "input"}),
            Measurement("memory_bytes", 3 << 30, {"host": host}),
        )
    ]
    return a_point(
        step,
        Measurement("steps_planned", 40.0),
        Measurement("hosts", float(hosts)),
        Measurement("loss", loss),
        Measurement("samples_per_second", 12345.0),
        Measurement("goodput_ratio", 0.75),
        Measurement("window_auc", 0.71, {"task": "label"}),
        Measurement("table_row_growth", 3.1, {"table": "clicks", "quantile": "0.9"}),
        Measurement("table_row_growth", 1.2, {"table": "users", "quantile": "0.9"}),
        Measurement("table_row_growth", 9.5, {"table": "users", "quantile": "0.5"}),
        Measurement("table_trained_ratio", 0.08, {"table": "clicks"}),
        *of_hosts,
        unix_s=2e9 + step,
    )


def committed(step: int) -> StreamLine:
    values = {"name": f"s{step:09d}-g00000001", "step": step, "size_bytes": 1 << 20, "seconds": 2.0}
    return an_event("commit", "committed", values, unix_s=2e9 + step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose driver has ended, with a fault on the way."""
    run_with(tmp_path / "run", two_tables(), 3)
    lines = [a_window(10, loss=0.9), committed(9), *a_fault("host 1 was killed\x1b[2J"), a_window(20, loss=0.6)]
    add_lines(tmp_path / "run", *lines)
    return tmp_path / "run"


def shown(run: Path, *, width: int = 80, height: int = 24, encoding: str = "utf-8") -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    seen = Watcher(str(run)).look(now_unix_s=NOW_UNIX_S)
    with console.capture() as captured:
        console.print(screen(seen, width=width, height=height, is_unicode=encoding == "utf-8"))
    return captured.get().splitlines()


def test_all_that_matters_fits_a_small_terminal(run: Path) -> None:
    lines = shown(run)
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in ("20 of 40", "loss     0.6000", "12,345 samples/s", "75.0%", "s000000009-g00000001", "no driver"):
        assert part in text
    assert re.search(r"^ +0 +70 +70% .*3\.0 GiB read 50, device 20", text, re.MULTILINE)
    assert "fault: host 1 was killed?[2J" in text, "what a terminal would obey is replaced"
    assert "1 recovery, 2 steps lost" in text
    assert "AUC of windows 0.7100" in text
    assert "tables   rows grown to 3.1 times (clicks)  trained from 8% (clicks)" in lines


def test_of_many_hosts_and_faults_some_are_shown(run: Path) -> None:
    add_lines(run, a_window(30, hosts=500), *(line for at in range(30) for line in a_fault(f"fault {at}")))
    for height in (24, 40):
        lines = shown(run, height=height)
        assert len(lines) < height
        assert re.search(r"\d+ of 500", "\n".join(lines))
    assert max(map(len, shown(run, width=40))) <= 40


def test_a_terminal_without_unicode(run: Path) -> None:
    assert "\n".join(shown(run, encoding="ascii")).isascii()
    assert "\n".join(shown(run, encoding="ascii", width=40)).isascii()


def test_a_pipe_gets_a_line_for_each_new_window_and_fault_until_the_driver_ends(tmp_path: Path) -> None:
    store, lease = create_run(tmp_path / "run", two_tables())
    del lease
    lease = take(store, "submission-7", unix_s=lambda: 2e9)
    lease.heartbeat()
    later = [
        lambda: None,
        lambda: add_lines(tmp_path / "run", a_window(10)),
        lambda: None,
        lambda: add_lines(tmp_path / "run", *a_fault("host 1 was killed"), a_window(20), a_window(25), a_window(30)),
        lease.release,
    ]

    class Clock(FakeClock):
        def wall_s(self) -> float:
            return 2e9 + 1

        def sleep(self, seconds: float) -> None:
            if later:
                later.pop(0)()

    out = io.StringIO()
    assert watch(str(tmp_path / "run"), console=Console(file=out, width=20), clock=Clock()) == 0
    lines = out.getvalue().splitlines()
    assert lines[0] == "run  no window yet"
    assert ESCAPE not in out.getvalue()
    steps = [line.split("  ")[0] for line in lines if line.startswith("step")]
    assert steps == ["step 10/40", "step 20/40", "step 25/40", "step 30/40"], "several came since the last look"
    assert sum("fault: host 1 was killed" in line for line in lines) == 1
    assert lines[-1] == "ended before its last step"


def test_a_driver_that_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    store, _ = create_run(tmp_path / "run", two_tables())
    take(store, "submission-7", unix_s=lambda: 2e9 - 100).heartbeat()
    add_lines(tmp_path / "run", a_window(10))
    out = io.StringIO()

    class Clock(FakeClock):
        def wall_s(self) -> float:
            return 2e9

    watch(str(tmp_path / "run"), console=Console(file=out), clock=Clock())
    assert out.getvalue().splitlines()[-1] == "the driver has been silent for 1:40"


def test_nothing_to_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(tmp_path / "run", two_tables(), 3)
    for run, words in (
        (tmp_path / "none", "Found no run in"),
        (tmp_path / "run", "Found no measurements and no driver"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["top", str(run)])
        assert caught.value.code == 87
        assert words in capsys.readouterr().err
    with pytest.raises(ConfigurationError):
        watch(str(tmp_path / "run"), console=Console(file=io.StringIO()), clock=FakeClock())


def test_a_run_that_just_begins_is_waited_for(tmp_path: Path) -> None:
    _, lease = create_run(tmp_path / "run", two_tables())
    lease.release()

    class Clock(FakeClock):
        begins_s = 100.0 + LONGEST_START_S / 2

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now_s >= self.begins_s:
                self.begins_s = math.inf
                add_lines(tmp_path / "run", a_window(10))

    late, never = Clock(), FakeClock()
    out = io.StringIO()
    with pytest.raises(ConfigurationError, match="Found no measurements and no driver"):
        watch(str(tmp_path / "run"), console=Console(file=out), clock=never)
    assert out.getvalue() == "run  waiting up to 2:00 for its driver to begin\n"
    assert never.now_s == pytest.approx(100 + LONGEST_START_S, abs=2)
    assert watch(str(tmp_path / "run"), console=Console(file=out), clock=late) == 0
    assert "\nstep 10/40  " in out.getvalue()


def test_alarms_that_stand_are_shown_as_health_finds_them(run: Path) -> None:
    def figures(step: int, log_loss: float) -> list[StreamLine]:
        return [
            a_window(step, loss=0.6 - step / 1000),
            replace_first_step(a_point(step, Measurement("evaluation", log_loss, {"metric": "log_loss"}))),
        ]

    assert "alarms   none" in shown(run)
    watcher, out = Watcher(str(run)), io.StringIO()
    pipe = _Lines(Console(file=out, width=20))

    def look() -> LiveSnapshot:
        seen = watcher.look(now_unix_s=NOW_UNIX_S)
        pipe.show(seen, "")
        return seen

    assert look().alarms == ()
    for step, log_loss in ((30, 0.5), (31, 0.507), (32, 0.507), (33, 0.507)):
        add_lines(run, *figures(step, log_loss))
    alarms = look().alarms
    assert [(found.key, began) for found, began in alarms] == [(("evaluation_falls", "log_loss"), 33)]
    assert "alarms   evaluation_falls log_loss since 33" in shown(run)
    look()
    add_lines(run, *figures(34, 0.4))
    assert look().alarms == ()
    look()
    told = [line for line in out.getvalue().splitlines() if "alarm" in line]
    assert told == [
        f"alarm: evaluation_falls log_loss since step 33: {alarms[0][0].text}",
        "alarm: evaluation_falls log_loss since step 33, over now",
    ]


def replace_first_step(line: StreamLine) -> StreamLine:
    """As an evaluation has it: it trains no step."""
    assert line.point is not None
    point = replace(line.point, first_step=line.point.step)
    return replace(line, values=point.to_json(), point=point)


def test_what_is_left_is_what_the_driver_said_less_what_has_passed(run: Path) -> None:
    line = a_window(30)
    assert line.point is not None
    point = replace(line.point, measurements=(*line.point.measurements, Measurement("left_seconds", 90.0)))
    assert Watcher(str(run)).look(now_unix_s=NOW_UNIX_S).left_s is None
    add_lines(run, replace(line, values=point.to_json(), point=point))
    assert Watcher(str(run)).look(now_unix_s=NOW_UNIX_S).left_s == pytest.approx(60.0)
    assert Watcher(str(run)).look(now_unix_s=NOW_UNIX_S + 900).left_s == 0.0


def test_it_reads_from_an_object_store(run: Path, s3_url: str) -> None:
    store = Store(s3_url)
    for path in run.rglob("*"):
        if path.is_file():
            store.write_new(str(path.relative_to(run)), [path.read_bytes()])
    assert Watcher(s3_url).look(now_unix_s=NOW_UNIX_S).total == 40


@pytest.mark.parametrize("no_colour", [False, long_case(True)])
def test_a_real_terminal(run: Path, no_colour: bool) -> None:
    """The view comes on a screen of its own, and the last one stays."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "PYTHONIOENCODING": "utf-8"}
    environment |= {"NO_COLOR": "1"} if no_colour else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "podembed", "top", str(run)], stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    told = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        told += piece
    os.close(leader)
    assert process.wait(60) == 0, told
    text = told.decode()
    assert "\x1b[?1049h" in text
    after = text.rpartition("\x1b[?1049l")[2]
    assert "ended before its last step" in after
    assert ("\x1b[36m" in text) != no_colour
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before, "it changes nothing"
