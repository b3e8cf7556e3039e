"""A signal at any moment of a command ends it with a sentence and a documented code. Here are a few moments; `make
signals` tries every tenth of a second.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podembed.jobs.command_signals import CommandSignals
from tests.faults.signal_sweep import MODULE, ROOT, WAYS, fault_of, sent, training
from tests.long_tests import long_case

# What may be loaded before a signal is taken over; all of it is Python's own, and takes milliseconds.
MOST_MODULES_BEFORE = 60


def test_handlers_are_set_before_anything_that_takes_time() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "podembed", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    ours = loaded[loaded.index("podembed") : loaded.index("podembed.jobs.command_signals")]
    assert len(ours) < MOST_MODULES_BEFORE
    assert not {name.split(".")[0] for name in ours} - {*sys.stdlib_module_names, "podembed"}


@pytest.mark.parametrize(
    ("way", "number", "to_group", "after_s"),
    [
        ("console", signal.SIGTERM, False, 0.0),
        ("console", signal.SIGINT, True, 1.5),
        long_case("module", signal.SIGINT, False, 0.0),
        ("module", signal.SIGHUP, True, 1.5),
        long_case("supervise", signal.SIGTERM, True, 0.0),
        ("supervise", signal.SIGINT, False, 1.5),
    ],
)
def test_train_says_so_and_ends_with_its_code(
    way: str, number: signal.Signals, to_group: bool, after_s: float, tmp_path: Path
) -> None:
    command = [*WAYS[way], *training(str(tmp_path), "--in-process")]
    end = sent(command, number, after_s=after_s, to_group=to_group, once_caught=True)
    assert not end.is_over
    assert way == "supervise" or end.output.startswith("podembed: loading the program\n")
    assert fault_of(end, number) is None, end.output[-2000:]


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["inspect", "nothing"], signal.SIGTERM),
        long_case(["plan"], signal.SIGINT),
        long_case(["prepare", "nothing"], signal.SIGTERM),
    ],
)
def test_commands_that_do_not_train_end_as_shells_have_it(
    command: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    end = sent([*MODULE, *command], number, after_s=0.0, to_group=False, once_caught=True)
    assert (end.code, end.is_over) == (128 + number, False)
    assert f"podembed: {number.name}: the command ends. What was committed stands." in end.output
    assert "Traceback" not in end.output


@pytest.mark.parametrize(
    ("command", "came", "code"),
    [
        ("train", [signal.SIGTERM], 85),
        ("resume", [signal.SIGINT], 85),
        ("train", [signal.SIGINT, signal.SIGINT], 130),
        ("train", [signal.SIGHUP, signal.SIGTERM], 85),
        ("train", [signal.SIGTERM, signal.SIGHUP], 85),
        ("fsck", [signal.SIGTERM, signal.SIGTERM], 143),
        ("fsck", [signal.SIGINT], 130),
    ],
)
def test_once_a_command_has_begun_it_is_interrupted_so_that_it_ends_in_order(
    command: str, came: list[signal.Signals], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    signals = CommandSignals([command])
    assert signals.exit_code is None
    signals.begin()
    for at, number in enumerate(came):
        if at and signal.SIGHUP in came:
            signals.on_signal(number, None)
            continue
        with pytest.raises(KeyboardInterrupt):
            signals.on_signal(number, None)
    assert signals.exit_code == code
    assert capfd.readouterr().err.count(came[0].name) == 1
