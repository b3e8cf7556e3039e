"""What people see of a run, and that the lines of Python it shows are right."""

from __future__ import annotations

import dataclasses
import shlex
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import pytest

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.text import format_bytes
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.manifest import Manifest, commit_file
from podembed.orchestrator.commit.run_record import WarmStartRecord, open_or_create
from podembed.tools.inspect.inspect_run import describe, format_age, reading_example, render
from podembed.workers.storage.store import Store
from tests.orchestrator.commit.checkpoint_samples import RECORD, TABLES, take, values_of, write_next

NOW_UNIX_S = 1_700_000_000.0 + 3600


@pytest.fixture
def run(tmp_path: Path) -> tuple[Store, list[Manifest]]:
    store = Store(tmp_path / "run")
    open_or_create(store, dataclasses.replace(RECORD, created_unix_s=1_700_000_000.0))
    lease = take(store, "submission-7", unix_s=lambda: NOW_UNIX_S - 4)
    manifests = []
    for step in (10, 20):
        manifests.append(write_next(store, lease, step))
        checkpoint.commit(store, manifests[-1], lease)
    late = write_next(store, lease, 99)
    successor = take(store, "submission-8", unix_s=lambda: NOW_UNIX_S - 4)
    store.create_exclusive(commit_file(late.name), b"late")
    manifests.append(write_next(store, successor, 30))
    checkpoint.commit(store, manifests[-1], successor)
    return store, manifests


def test_the_description_says_which_commits_count(run) -> None:
    store, manifests = run
    description = describe(store, now_unix_s=NOW_UNIX_S)
    assert description.head is not None
    assert description.head.manifest == manifests[-1]
    assert description.generation == 2
    assert [(commit.step, commit.counts) for commit in description.commits] == [
        (30, True),
        (20, True),
        (10, True),
        (99, False),
    ]


def test_the_text_shows_commits_tables_and_the_driver(run) -> None:
    store, manifests = run
    text = render(describe(store, now_unix_s=NOW_UNIX_S))
    lines = text.splitlines()
    assert lines[0] == f"Run run-1 in {store.location}, created 60 min ago"
    assert "driver submission-8" in lines[2]
    assert "seen 4 s ago" in lines[2]
    (head,) = [line for line in lines if line.strip().startswith(manifests[-1].name)]
    assert head.split() == [
        manifests[-1].name,
        "30",
        "2",
        manifests[-2].name,
        "59",
        "min",
        *format_bytes(manifests[-1].size_bytes).split(),
        "full,",
        *format_bytes(manifests[-1].size_bytes).split(),
        "2",
        "head",
    ]
    assert any("s000000099" in line and "leftover" in line and "DAMAGED" in line for line in lines)
    (users,) = [line for line in lines if line.strip().startswith("users")]
    assert users.split()[:6] == ["users", "37", "3", "4", "accumulator", "(1)"]


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("array", [0, 1])
def test_the_python_that_is_shown_reads_the_table(run, table: str, array: int) -> None:
    store, manifests = run
    (files,) = [entry for entry in manifests[-1].tables if entry.name == table]
    code = [line.strip() for line in reading_example(store.location, files, array).splitlines()[1:-1]]
    assert len(code) == 3
    names: dict[str, np.ndarray] = {}
    exec("\n".join(code), names)
    name = files.arrays[array].name
    buckets = values_of(30, table, name)
    num_rows, num_buckets, _ = TABLES[table]
    expected = np.stack([buckets[row % num_buckets, row // num_buckets] for row in range(num_rows)])
    np.testing.assert_array_equal(names[name], expected)


def test_what_is_shown_says_what_to_install_and_how_to_do_without(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """zarr is only there for those who develop this program, so the other way is tried as it is printed."""
    store, manifests = run
    monkeypatch.chdir(tmp_path)
    (files,) = [entry for entry in manifests[-1].tables if entry.name == "users"]
    for array in (0, 1):
        first, *_, last = reading_example(store.location, files, array).splitlines()
        assert "pip install 'zarr>=3'" in first
        command, *words = shlex.split(last.split(": ", 1)[1])
        assert command == "podembed"
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        read = np.load(tmp_path / "users.npy")
        buckets = values_of(30, "users", files.arrays[array].name)
        expected = np.stack([buckets[row % 4, row // 4] for row in range(37)])
        np.testing.assert_array_equal(read[files.arrays[array].name] if array else read, expected)
        (tmp_path / "users.npy").unlink()
    capsys.readouterr()


def test_zarr_is_not_installed_with_the_program() -> None:
    """Otherwise the advice to install it first would be wrong."""
    needed = requires("podembed") or []
    assert [line for line in needed if line.startswith("zarr") and "extra" not in line] == []


def test_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    text = render(describe(Store(tmp_path / "nothing"), now_unix_s=NOW_UNIX_S))
    assert "is not a run" in text
    assert "No commits yet" in text
    assert not (tmp_path / "nothing").exists()


def test_nothing_in_a_file_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    lease = take(store, "evil\x1b]0;title\x07")
    manifest = write_next(store, lease, 10)
    checkpoint.commit(store, manifest, lease)
    store.replace(commit_file(manifest.name), b'{"\x1b[2J":1}')
    text = render(describe(store, now_unix_s=NOW_UNIX_S))
    assert all(c.isprintable() or c == "\n" for c in text)


def test_a_damaged_head_is_shown_and_not_raised(run) -> None:
    store, manifests = run
    store.replace(commit_file(manifests[-1].name), b"{}")
    text = render(describe(store, now_unix_s=NOW_UNIX_S))
    assert "head, DAMAGED" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172800, "2 d"), (9e6, "104 d")]
)
def test_ages_are_readable(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_what_a_commit_was_worth_and_where_a_run_began_are_shown(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    start = WarmStartRecord(location="old/run", run_id="run-0", commit="s000000007-g00000001", rules=("a=reinit",))
    open_or_create(store, dataclasses.replace(RECORD, warm_start=start))
    lease = take(store)
    manifest = dataclasses.replace(write_next(store, lease, 10), metrics={"auc": 0.78125, "log_loss": 0.5})
    checkpoint.commit(store, manifest, lease)
    text = render(describe(store, now_unix_s=manifest.created_unix_s))
    assert "Began from s000000007-g00000001 of run run-0 in old/run with a=reinit" in text
    assert "head; auc 0.7812, log_loss 0.5000" in text
