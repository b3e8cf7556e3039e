"""A slip in a command line gets one line with what was meant, and no flag that exists is taken for a slip."""

from __future__ import annotations

import re

import pytest

from podembed.jobs.cli.unknown import unknown_in
from tests.jobs.cli.test_main import COMMANDS, run

# An entry of the help, whose text may begin a line with another command's flag.
ENTRY = re.compile(r"^[ │]{0,4}(?:-h, )?(--[a-z][a-z0-9-]*)(?:, (--[a-z][a-z0-9-]*))?", re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --host 2", "Found --host. Did you mean --hosts? Expected"),
        ("train --host=2", "Found --host. Did you mean --hosts? Expected"),
        ("train --batch_size 3", "Found --batch_size. Expected a flag of train: podembed train --help lists them."),
        ("trian --hosts 2", "Found the command 'trian'. Did you mean train? Expected one of train, resume"),
        ("calibrate --out x", "Found the command 'calibrate'. It is gone: podembed plan estimates from what it counts"),
        ("plan --calibration=x", "Found --calibration. It is gone: podembed plan estimates from what it counts"),
        ("plan --hosts_per_machine 2", "Found --hosts_per_machine. It is gone: bytes are counted"),
        ("chaos --record x", "Found --record. It is gone: the last line that is printed has what was seen"),
        ("qqq", "Found the command 'qqq'. Expected one of train, resume"),
    ],
)
def test_a_slip_is_told_in_one_line_with_what_was_meant(line: str, said: str) -> None:
    code, out, err = run(*line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_the_help_is_known(name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    offered = [flag for entry in ENTRY.findall(out) for flag in entry if flag]
    assert offered
    own = [flag for flag in offered if unknown_in([name, flag], COMMANDS) is not None]
    assert own == []


def test_values_and_numbers_are_no_flags() -> None:
    assert unknown_in(["train", "--set", "x=--y", "-1", "--max-bad-lines=3", "--no-resume", "--"], COMMANDS) is None
    assert unknown_in(["--help"], COMMANDS) is None
    assert unknown_in([], COMMANDS) is None
