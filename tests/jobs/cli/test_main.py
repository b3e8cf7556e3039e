"""The command line: help worth reading, flags that are checked before anything is made, and `inspect`, whose words are
executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from podembed.jobs.built_in import parse_settings
from podembed.jobs.cli.main import Command, Resume, Train, default_storage, main
from podembed.orchestrator.api.config import ConfigurationError
from tests.long_tests import long_case
from tests.run_state import committed_state

ROOT = Path(__file__).parents[3]
JOB = ["--job", "tests.faults.broken_jobs:broken_job"]


def commands(kind: Any = Command) -> dict[str, type]:
    """Name → class of every command of the program."""
    if get_origin(kind) in (Union, UnionType):
        return {name: found for part in get_args(kind) for name, found in commands(part).items()}
    command, *notes = get_args(kind)
    return {next(note.name for note in notes if hasattr(note, "name")): command}


COMMANDS = commands()


def is_positional(command: type, field: str) -> bool:
    return "Positional" in str(get_type_hints(command, include_extras=True)[field])


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(list(arguments))
    code = left.value.code
    return code if isinstance(code, int) else 1, out.getvalue(), err.getvalue()


def flat(text: str) -> str:
    """Help without boxes and line breaks."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def documented(command: type) -> dict[str, str]:
    """Field → the text below it in the source, as one line."""
    # The command's own fields, then those of the classes that it shares them with.
    body = "\n".join(inspect.getsource(one) for one in command.__mro__ if dataclasses.is_dataclass(one))
    found = {}
    for field in dataclasses.fields(command):
        match = re.search(rf'\n    {field.name}: .*\n    """([^"]+)"""', body)
        assert match, f"--{field.name} of {command.__name__} has no text"
        found[field.name] = flat(match.group(1))
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_explained_in_the_help(name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    text = flat(out)
    for field, words in documented(COMMANDS[name]).items():
        if not is_positional(COMMANDS[name], field):
            assert "--" + field.replace("_", "-") in text
        assert flat(words)[:40] in text
        assert len(words.split()) >= 2


def test_the_overview_names_every_command_and_what_it_does() -> None:
    code, out, _ = run("--help")
    assert code == 0
    for words in (
        "train",
        "Begin a new run",
        "resume",
        "Go on from the last commit",
        "inspect",
        "List a run's commits",
    ):
        assert words in flat(out)


def test_flags_are_few() -> None:
    """One more flag is a decision, not an accident. `--trace` is asked of one start, so it is no setting of a job."""
    assert len(dataclasses.fields(Train)) <= 38
    assert len(dataclasses.fields(Resume)) <= 33


@pytest.mark.parametrize("arguments", [["train", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_do_not_wait_for_jax_or_ray(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from podembed.jobs.cli.main import main\n"
        f"try:\n    main({arguments})\n"
        "finally:\n    print('loaded', sorted({'jax', 'ray', 'numba'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("loaded []\n")


@pytest.mark.parametrize(
    ("pairs", "settings"),
    [
        ((), {}),
        (("epochs=2", "learning_rate=0.02"), {"epochs": 2, "learning_rate": 0.02}),
        (("name=clicks", "folder=/a b/c=d"), {"name": "clicks", "folder": "/a b/c=d"}),
        (
            ("flag=true", "nothing=null", "sizes=[1, 2]", "empty="),
            {"flag": True, "nothing": None, "sizes": [1, 2], "empty": ""},
        ),
    ],
)
def test_settings_are_json_or_words(pairs: tuple[str, ...], settings: dict[str, object]) -> None:
    assert parse_settings(pairs) == settings


@pytest.mark.parametrize("pair", ["epochs", "=2", "a-b=1", "1x=2", ""])
def test_settings_that_are_no_pair_are_refused(pair: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Found --set {re.escape(pair)}\. Expected name=value"):
        parse_settings((pair,))


SLICE = ("--topology", "4x4", "--accelerator-type", "TPU-V6E")


def test_runs_lie_here_or_in_the_home_of_a_ray_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert default_storage() == ".runs"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert default_storage() == os.path.expanduser("~/.podembed/runs")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", *JOB, "--hosts", "0"], "Found --hosts 0. Expected at least 1, or a range such as 2-8"),
        (["train", *JOB, "--hosts", "-2"], "Found --hosts -2"),
        (["train", *JOB, "--hosts", "13"], "13 hosts for the 12 lanes"),
        (["train", *JOB, "--hosts", "2", "--in-process"], "Leave in_process out"),
        (["train", *JOB, "--threads-per-host", "0"], "Found --threads-per-host 0."),
        (["train", *JOB, "--resources", "GPU"], "Found --resources GPU."),
        (["train", *JOB, "--devices-per-host", "0"], "Found --devices-per-host 0. Expected at least 1."),
        (["train", *JOB, "--mesh", "data=2,model"], "Found --mesh data=2,model. Expected the axes of a host's devices"),
        (["train", *JOB, "--mesh", "data=2", "data=2"], "Found --mesh 'data=2 data=2'. Expected the axes"),
        (["train", *JOB, "--mesh", "model=2"], "Found --mesh model=2. Expected the axis 'data'"),
        (
            ["train", *JOB, "--mesh", "data=2,model=2", "--devices-per-host", "8"],
            "Found --mesh data=2,model=2, which are 4 devices, beside devices_per_host=8. Expected as many",
        ),
        (["train", *JOB, "--resources", "CPU=1", "GPU=nan"], "Found --resources GPU=nan."),
        (["train", *JOB, "--hosts", "2", "--resources", "GPU=0.5"], "Found 0.5 GPU a host"),
        (["train", *JOB, "--checkpoint-every", "0"], "Found --checkpoint-every 0."),
        (["train", *JOB, "--eval-every", "0"], "Found --eval-every 0."),
        (["train", *JOB, "--max-steps", "-1"], "Found --max-steps -1."),
        (["train", *JOB, "--max-steps", "epoch"], "Found --max-steps epoch. Expected steps such as 500, or epochs"),
        (["train", *JOB, "--keep-every", "0epoch"], "Found --keep-every 0epoch. Expected more than none"),
        (["train", *JOB, "--checkpoint-seconds", "0"], "Found --checkpoint-seconds 0.0."),
        (["train", *JOB, "--keep", "1"], "Found --keep 1."),
        (["train", *JOB, "--keep-every", "0"], "Found --keep-every 0."),
        (["train", *JOB, "--keep-best", "-1"], "Found --keep-best -1."),
        (["train", *JOB, "--set", "folder=/no/such"], "/no/such/part-*.parquet"),
        (["train", *JOB, "--warm-start", "/no/such/run"], "/no/such/run"),
        (["train", *JOB, "--set", "folder"], "Expected name=value"),
        (["train", *JOB, "--set", "folder=/x", "colour=1"], "unexpected keyword argument 'colour'"),
        (["train", "--job", "no.such.module:job"], "cannot be imported"),
        (["train", "--job", "synthetik"], "Expected package.module:function"),
        (["train", "--data", "/no/such/*.gz"], "no file that matches /no/such/*.gz"),
        (["train", "--eval-data", "/no/such/*.gz"], "--eval-data without --data"),
        (["train", "--data", "tests"], "the folder"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(
    arguments: list[str], words: str, tmp_path: Path, small_data: str
) -> None:
    if JOB[1] in arguments and "--set" not in arguments:
        arguments = [*arguments, "--set", f"folder={small_data}"]
    code, _, err = run(*arguments, "--storage", str(tmp_path / "runs"), "--name", "x")
    assert code == 87
    assert err.startswith("podembed: Found ")
    assert words in err
    assert not (tmp_path / "runs").exists()


def test_commits_by_the_clock_with_stale_lookups_are_refused_before_anything_is_made(
    tmp_path: Path, small_data: str
) -> None:
    job = ["--job", "tests.small_job:small_job", "--set", f"folder={small_data}", "staleness=1"]
    code, _, err = run("train", *job, "--checkpoint-seconds", "5", "--storage", str(tmp_path / "runs"), "--name", "x")
    assert (code, "every_seconds=5.0 with staleness=1" in err) == (87, True)
    assert not (tmp_path / "runs").exists()


def test_commands_on_a_folder_that_is_no_run(tmp_path: Path) -> None:
    code, _, err = run("resume", str(tmp_path))
    assert (code, "Found no run in" in err) == (87, True)
    code, out, err = run("inspect", str(tmp_path))
    assert (code, "") == (87, out)
    assert "Found no run in" in err


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run made by the command, in a folder whose name has a space; and what it printed."""
    storage = tmp_path_factory.mktemp("with space") / "my runs"
    arguments = ["train", *JOB, "--set", f"folder={small_data}", "--in-process", "--max-steps", "12"]
    arguments += ["--checkpoint-every", "5", "--storage", str(storage), "--name", "first run"]
    code, out, err = run(*arguments)
    assert code == 0, err
    return storage / "first run", out


def test_a_run_says_what_it_does_and_what_to_type_next(trained: tuple[Path, str]) -> None:
    folder, out = trained
    for words in (
        "job small: 1,900 training samples",
        f"run folder {folder}",
        "committed s000000005",
        "done at step 12 of 12",
    ):
        assert words in out
    assert f"inspect '{folder}'" in out
    assert f"resume '{folder}'" in out


def snippet(out: str) -> str:
    lines = out[out.index("Read table") :].splitlines()[1:]
    return "\n".join(line.removeprefix("  ") for line in lines if line.startswith("  "))


def test_the_lines_that_inspect_prints_read_the_table(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    code, out, _ = run("inspect", str(folder))
    assert code == 0
    for words in ("s000000012-g00000001", "head", "tests.faults.broken_jobs:broken_job", "a ", "bags", "accumulator"):
        assert words in out
    names: dict[str, np.ndarray] = {}
    exec(snippet(out), {}, names)  # what a person would paste
    table = re.search(r"Read table '(\w+)'", out)
    assert table is not None
    expected = committed_state(str(folder))[f"{table.group(1)}/rows"]
    np.testing.assert_array_equal(names["rows"], expected)


def test_resuming_from_the_folder_goes_on_where_it_stood(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    code, out, err = run("resume", str(folder), "--in-process", "--max-steps", "15")
    assert code == 0, err
    assert "generation 2: 1 host, from commit s000000012-g00000001" in out
    assert "done at step 15 of 15" in out


def test_hosts_of_zero_are_not_taken_for_the_default(trained: tuple[Path, str]) -> None:
    code, _, err = run("resume", str(trained[0]), "--hosts", "0")
    assert (code, "Found --hosts 0." in err) == (87, True)


def test_a_failing_model_ends_with_code_1_and_its_traceback(small_data: str, tmp_path: Path) -> None:
    arguments = ["train", *JOB, "--set", f"folder={small_data}", "model=trace", "--in-process"]
    code, _, err = run(*arguments, "--storage", str(tmp_path), "--name", "x")
    assert code == 1
    assert err.startswith("podembed: device 0 failed: KeyError")
    assert 'raise KeyError("the user\'s model is wrong")' in err


@pytest.mark.parametrize(
    ("text", "hosts"), [("1", 1), ("12", 12), ("2-8", (2, 8)), ("2-2", (2, 2)), ("0", 0), ("8-2", (8, 2))]
)
def test_hosts_are_a_number_or_a_range(text: str, hosts: int | tuple[int, int]) -> None:
    """What cannot work is refused by the config."""
    from podembed.jobs.cli.settings import parse_hosts

    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "-", "2-", "-2", "two", "2-8-9", "2.5", "2 - 8"])
def test_hosts_that_are_neither_are_refused(text: str) -> None:
    from podembed.jobs.cli.settings import parse_hosts

    with pytest.raises(ConfigurationError, match="Expected a number such as 4, or a range such as 2-8"):
        parse_hosts(text)


def read_one_line(arguments: Sequence[str], folder: Path) -> tuple[str, int, str]:
    """What `podembed ... | head -1` shows, with the exit code and the errors of the command."""
    program = Path(sys.executable).with_name("podembed")
    # So that the command meets the closed pipe as soon as it prints, whatever is buffered.
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [str(program), *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        line = child.stdout.readline().decode()
        child.stdout.close()
        errors = child.stderr.read().decode()
    return line, child.returncode, errors


def closed_output(arguments: Sequence[str], folder: Path, *, is_unbuffered: bool) -> tuple[int, str]:
    """Exit code and errors of a command whose output nobody reads at all."""
    program = Path(sys.executable).with_name("podembed")
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | ({"PYTHONUNBUFFERED": "1"} if is_unbuffered else {})
    done = subprocess.run(
        [str(program), *arguments], cwd=folder, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "is_unbuffered"),
    [
        (["train", "--help"], False),
        (["inspect"], True),
        *(long_case(["--help"], is_unbuffered) for is_unbuffered in (False, True)),
        long_case(["train", "--help"], True),
        long_case(["inspect"], False),
    ],
)
def test_a_reader_that_leaves_is_no_error(
    command: list[str], is_unbuffered: bool, trained: tuple[Path, str], tmp_path: Path
) -> None:
    arguments = [*command, str(trained[0])] if command == ["inspect"] else command
    assert closed_output(arguments, tmp_path, is_unbuffered=is_unbuffered) == (141, "")


def test_training_goes_on_when_nobody_reads_its_lines(small_data: str, tmp_path: Path) -> None:
    arguments = ["train", *JOB, "--set", f"folder={small_data}", "--in-process", "--max-steps", "6"]
    line, code, errors = read_one_line([*arguments, "--storage", "runs", "--name", "x"], tmp_path)
    assert "loading the job" in line
    assert code == 0
    loading, _, errors = errors.partition("\n")
    assert loading == "podembed: loading the program"
    assert errors == "podembed: nobody reads the output any more; the run goes on without it\n"
    assert (tmp_path / "runs/x/commit/s000000006-g00000001.json").exists()


@pytest.mark.parametrize(
    ("text", "steps"),
    [("500", 500), ("1epoch", 40), ("2epochs", 80), ("0.5epoch", 20), ("1/8epoch", 5), ("0.25 epoch", 10)],
)
def test_an_interval_is_steps_or_epochs(text: str, steps: int) -> None:
    from podembed.jobs.cli.settings import parse_interval

    assert parse_interval("--eval-every", text, 40) == steps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "0.33epoch",
            "--eval-every of 0.33 epochs, which is 13.2 steps of an epoch of 40. Expected whole steps. Give it in "
            "steps, such as --eval-every 13",
        ),
        ("0epoch", "Expected more than none"),
        ("epoch", "Expected steps such as 500, or epochs such as 1epoch"),
        ("1e3epo", "Expected steps such as 500"),
        ("2.5", "Expected steps such as 500"),
        ("", "Expected steps such as 500"),
        ("1/0epoch", "Expected steps such as 500"),
    ],
)
def test_an_interval_that_is_neither_or_not_whole_is_refused(text: str, words: str) -> None:
    from podembed.jobs.cli.settings import parse_interval

    with pytest.raises(ConfigurationError, match=re.escape(words)):
        parse_interval("--eval-every", text, 40)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--eval-every", "0"], r"Found --eval-every 0\. Expected at least 1 step"),
        (["train", "--checkpoint-every", "-3"], r"Found --checkpoint-every -3\. Expected at least 1 step"),
        (["train", "--keep", "0"], r"Found --keep 0\. Expected at least 2, .*Leave the flag out"),
        (["train", "--keep-best", "-1"], r"Found --keep-best -1\."),
        (["train", "--full-every", "0"], r"Found --full-every 0\."),
        (["train", "--checkpoint-seconds", "-1"], r"Found --checkpoint-seconds -1\.0\. Expected seconds above 0"),
        (["train", "--threads-per-host", "0"], r"Found --threads-per-host 0\."),
        (["train", "--hosts", "0"], r"Found --hosts 0\."),
        (["plan", "--hosts", "0"], r"Found --hosts 0\."),
        (["train", "--eval-every", "1e400epoch"], r"Found --eval-every 1e400epoch\. Expected steps such as 500"),
        (["train", "--max-steps", "1e999999999epochs"], r"Found --max-steps 1e999999999epochs\."),
        (["train", "--hosts", "2 3"], r"Found --hosts '2 3'\."),
        (["train", "--slices", "2"], r"Found --slices 2 without a topology\. Expected .*--topology"),
        (["train", *SLICE, "--slices", "x"], r"Found --slices x\. Expected a number such as 4, or a range"),
        (["train", *SLICE, "--slices", "0"], r"Found --slices 0\. Expected at least 1"),
        (["train", *SLICE, "--slices", "3-2"], r"Found --slices 3-2\. Expected .*a range such as 2-8"),
        (["train", *SLICE, "--hosts", "8"], r"Found --hosts 8 beside topology='4x4'\. .*Leave .*--hosts.* out"),
        (["train", *SLICE, "--in-process"], r"Found in_process with topology='4x4'"),
        (["train", *SLICE, "--resources", "TPU=8"], r"hosts of 4x4 TPU-V6E\. Expected all 4 chips"),
        (["train", *SLICE, "--platform", "gpu"], r"Found platform='gpu'\. Expected 'cpu', or None"),
        (["train", "--topology", "4x5", "--accelerator-type", "v6e"], r"Found topology='4x5'.*Expected one of 1x1"),
        (["train", *SLICE, "--slices", "40"], r"Found 160 hosts, 4 for each slice of 4x4 TPU-V6E, for the"),
        (
            ["train", "--job", "criteo"],
            r"Found --job criteo without --data\. .*--data '/data/day_\*\.gz'.*generates some",
        ),
        (["plan", "--job", "criteo"], r"Found --job criteo without --data\."),
        (["train", "--job", "movielens"], r"Found --job movielens without --data\. .*grouplens"),
        (["train", "--job", "ncf"], r"Found --job ncf without --data\. .*grouplens"),
        (["train", "--job", "bpr", "--data", "no-such-folder"], r"Found --data no-such-folder for bpr\. .*one folder"),
    ],
    ids=" ".join,
)
def test_a_wrong_flag_is_named_as_it_was_typed(arguments: list[str], words: str) -> None:
    code, _, err = run(*arguments)
    assert code == 87
    assert re.search(words, flat(err)), err


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["train", "--name", ""], "--name"),
        (["train", "--job", ""], "--job"),
        (["train", "--metric", ""], "--metric"),
        (["train", "--storage", ""], "--storage"),
        (["train", "--data", ""], "--data"),
        (["train", "--hosts", ""], "--hosts"),
        (["train", "--checkpoint-every", ""], "--checkpoint-every"),
        (["resume", ""], "RUN"),
        (["inspect", ""], "RUN"),
        (["fsck", ""], "RUN"),
        (["plan", ""], "RUN"),
    ],
    ids=" ".join,
)
def test_an_empty_value_does_not_count_as_left_out(arguments: list[str], flag: str) -> None:
    code, _, err = run(*arguments)
    assert code == 87
    assert f"Found {flag} ''. Expected a value." in err


def test_a_flag_that_is_left_out_does_not_count_as_empty() -> None:
    code, out, _ = run("chaos", "--list")
    assert code == 0
    assert out.startswith("F1.1 ")


def test_nothing_stands_behind_version() -> None:
    code, out, err = run("--version", "extra")
    assert (code, out) == (2, "")
    assert "Found extra behind --version" in err
