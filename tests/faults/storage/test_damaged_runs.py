"""Real runs whose files were damaged or forged behind their back: nothing of it is trained on, the file is named, and
an older commit is used only when the user says so.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import Manifest, commit_file, to_json
from podembed.orchestrator.commit.patience import Patience
from podembed.orchestrator.commit.run_record import read_run
from podembed.orchestrator.commit.verification import size_damages
from podembed.orchestrator.driver import committing
from podembed.workers.storage import local as local_files
from podembed.workers.storage.records import encode
from podembed.workers.storage.store import Store
from tests.jobs.cli.test_main import run as podembed
from tests.orchestrator.commit.checkpoint_samples import commit_steps, take, write_next
from tests.orchestrator.committed_tables import flip_byte
from tests.run_state import assert_same_bytes, committed_state

JOB = ["--job", "tests.faults.broken_jobs:broken_job", "--in-process", "--checkpoint-every", "3"]


def train(folder: str, runs: Path, *arguments: str) -> tuple[int, str, str]:
    return podembed("train", *JOB, "--set", f"folder={folder}", "--storage", str(runs), "--name", "run", *arguments)


def resume(path: Path, *arguments: str) -> tuple[int, str, str]:
    return podembed("resume", str(path), "--in-process", "--checkpoint-every", "3", "--max-steps", "9", *arguments)


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits after 3 and 6 steps."""
    runs = tmp_path_factory.mktemp("runs")
    code, _, err = train(small_data, runs, "--max-steps", "6")
    assert code == 0, err
    return runs / "run"


@pytest.fixture(scope="module")
def whole(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The state after nine steps of the run when nothing happens to it."""
    path = shutil.copytree(trained, tmp_path_factory.mktemp("whole") / "run")
    code, _, err = resume(path)
    assert code == 0, err
    return committed_state(str(path))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def head_of(path: Path) -> Manifest:
    manifest = checkpoint.load_head(Store(path))
    assert manifest is not None
    return manifest


def of_table(array: str, name: str = "b") -> Callable[[Manifest], str]:
    def file(head: Manifest) -> str:
        table = next(table for table in head.tables if table.name == name)
        return next(chunk.name for chunk in table.chunks if (chunk.array, chunk.bucket) == (array, 5))

    return file


def of_dense(head: Manifest) -> str:
    return next(leaf.chunk_file for leaf in head.dense if leaf.key == "params/hidden")


FILES: dict[str, tuple[Callable[[Manifest], str], int]] = {
    "rows": (of_table("rows"), 8),
    "checksum of rows": (of_table("rows"), -2),
    "slot": (of_table("velocity"), 70),
    "dense leaf": (of_dense, 3),
    "manifest": (lambda head: commit_file(head.name), 200),
    "seal of the manifest": (lambda head: commit_file(head.name), -20),
    "base": (lambda head: "lease/g00000001.base.json", 12),
    "record": (lambda head: "RUN.json", 30),
}


@pytest.mark.parametrize("kind", FILES)
def test_one_changed_bit_of_any_file_is_found_before_a_step_is_trained(run: Path, kind: str) -> None:
    file, at = FILES[kind][0](head_of(run)), FILES[kind][1]
    flip_byte(run / file, at if at >= 0 else (run / file).stat().st_size + at)
    code, out, err = resume(run)
    assert code == 87, out + err
    assert file in err
    if kind in ("rows", "checksum of rows", "slot"):
        assert "table 'b', " in err
        assert "bucket 5 (3750 rows: 5, 13, 21 ... " in err
    assert "Traceback" not in err
    assert not list((run / "commit").glob("s000000009-*")), "nothing was trained and committed"


def test_a_damaged_base_is_done_without_where_that_is_allowed(run: Path, whole: dict[str, np.ndarray]) -> None:
    """The remedy that the check and the refusal name; nothing is lost, since the commits tell the same."""
    head = head_of(run)
    flip_byte(run / "lease/g00000001.base.json", 12)
    code, out, _ = podembed("fsck", str(run))
    assert code == 1
    assert f"podembed resume {run} --allow-ancestor" in out
    code, out, err = resume(run, "--allow-ancestor")
    assert code == 0, err
    assert f"from commit {head.name}" in out
    assert_same_bytes(committed_state(str(run)), whole)


@pytest.mark.parametrize("name", ["INPUT.json", "policies/g00000001.json"])
def test_damaged_advice_is_found_said_and_stops_nobody(run: Path, whole: dict[str, np.ndarray], name: str) -> None:
    flip_byte(run / name, 25)
    code, out, _ = podembed("fsck", str(run))
    assert code == 1
    assert name in out
    assert "it is advice" in out
    code, out, err = resume(run)
    assert code == 0, err
    assert name in out
    assert "damaged and ignored" in out
    if name.startswith("policies"):
        assert "All commits stay" in out
    assert_same_bytes(committed_state(str(run)), whole)


def test_without_its_record_a_run_is_where_a_new_one_can_begin(small_data: str, run: Path, tmp_path: Path) -> None:
    flip_byte(run / "RUN.json", 30)
    code, out, _ = podembed("fsck", str(run))
    assert code == 1
    source = f"{run}@{head_of(run).name}"
    assert f"--warm-start {source}" in out
    code, _, err = train(small_data, tmp_path / "next", "--max-steps", "3", "--warm-start", source)
    assert code == 0, err


@pytest.mark.parametrize("kind", ["rows", "dense leaf", "manifest"])
def test_an_older_commit_is_used_loudly_and_only_when_allowed(
    run: Path, whole: dict[str, np.ndarray], kind: str
) -> None:
    head = head_of(run)
    file = FILES[kind][0](head)
    flip_byte(run / file, FILES[kind][1])
    code, out, err = resume(run, "--allow-ancestor")
    assert code == 0, err
    assert f"commit {head.name} is damaged and passed over, its steps are done again: " in out
    assert file in out
    assert "from commit s000000003-g00000001" in out
    assert_same_bytes(committed_state(str(run)), whole)
    assert head.name not in read_lineage(Store(run))


@pytest.mark.parametrize("how", ["missing", "cut", "link"])
def test_files_that_are_not_there_whole_are_found_before_workers_start(run: Path, how: str, tmp_path: Path) -> None:
    file = of_table("rows")(head_of(run))
    path, content = run / file, (run / file).read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(content[:-1])
    if how == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    code, out, err = resume(run)
    assert (code, file in err, "starting" in out) == (87, True, False)


def test_extra_files_are_ignored_and_told(run: Path, whole: dict[str, np.ndarray]) -> None:
    head = head_of(run)
    extra = run / "data" / head.name / "tables" / "b" / "rows" / "c.99.0.0"
    extra.write_bytes(b"\x80\x04\x95 a pickle")
    assert resume(run)[0] == 0
    assert_same_bytes(committed_state(str(run)), whole)
    code, out, _ = podembed("fsck", str(run))
    assert (code, head.name in out.partition("Left over")[2]) == (0, True)


class TestForgedRecords:
    """The seal is a checksum, not a signature: anybody can write a RUN.json whose seal is good."""

    def forge(self, run: Path, **members: object) -> None:
        record = dataclasses.replace(read_run(Store(run)), **members)  # type: ignore[arg-type]
        (run / "RUN.json").write_bytes(encode(record))

    @pytest.mark.parametrize(
        ("function", "arguments"),
        [
            ("os:system", '{"command": "touch FILE"}'),
            ("subprocess:run", '{"args": ["touch", "FILE"]}'),
            ("subprocess:Popen", '{"args": ["touch", "FILE"]}'),
            ("pathlib:Path.touch", '{"self": "FILE"}'),
            ("builtins:exec", "{\"source\": \"open('FILE', 'w')\"}"),
            ("shutil:rmtree", '{"path": "FILE"}'),
            ("podembed.orchestrator.run.opening:create_run", '{"url": "FILE", "job": 1, "reference": 1}'),
        ],
    )
    def test_no_function_is_called_but_one_that_returns_a_job(
        self, run: Path, tmp_path: Path, function: str, arguments: str
    ) -> None:
        victim = tmp_path / "touched"
        if "rmtree" in function:
            victim.mkdir()
        self.forge(run, job_function=function, job_arguments=arguments.replace("FILE", str(victim)))
        code, _, err = resume(run)
        assert (code, err.startswith("podembed: ")) == (87, True)
        assert victim.exists() == ("rmtree" in function)

    @pytest.mark.parametrize("arguments", ["[" * 5000, "[1]", '{"folder": NaN}', '{"a": 1, "a": 2}', "not JSON", ""])
    def test_arguments_that_are_no_json_object_are_refused(self, run: Path, arguments: str) -> None:
        self.forge(run, job_arguments=arguments)
        code, _, err = resume(run)
        assert (code, "RUN.json" in err) == (87, True)

    def test_tables_of_another_size_are_refused_before_anything_is_allocated(self, run: Path) -> None:
        tables = read_run(Store(run)).tables
        giant = dataclasses.replace(tables[0], num_rows=2**62, num_buckets=2**40, dim=2**40)
        self.forge(run, tables=(giant, *tables[1:]))
        code, _, err = resume(run)
        assert (code, f"has dimension {2**40}" in err) == (87, True), err


def test_a_commit_of_other_versions_is_told(run: Path) -> None:
    head = head_of(run)
    versions = {**head.versions, "jax": "0.0.1"}
    path = run / commit_file(head.name)
    path.write_bytes(to_json(dataclasses.replace(head, versions=versions)))
    code, out, err = resume(run)
    assert code == 0, err
    assert f"commit {head.name} was written with jax 0.0.1 (now " in out.replace("\n", " ")


def test_a_disk_that_is_full_keeps_the_commit_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once half of the next commit is written."""
    before, head = committed_state(str(run)), head_of(run)
    real, written = os.writev, [0]

    def writev(handle: int, views: list[memoryview]) -> int:
        written[0] += sum(map(len, views))
        if written[0] > head.size_bytes // 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, views)

    with monkeypatch.context() as patched:
        patched.setattr(local_files.os, "writev", writev)
        # Nobody makes room here, so there is nothing to wait for.
        patched.setattr(committing, "Patience", lambda **_: Patience(max_failed_saves=0, timeout_s=0.0))
        code, _, err = resume(run)
    assert (code, "No space left on device" in err, "keep fewer commits" in err) == (87, True, True)
    assert not list(run.rglob(".tmp-*"))
    assert head_of(run) == head
    assert_same_bytes(committed_state(str(run)), before)
    code, _, err = resume(run)
    assert code == 0, err
    assert podembed("fsck", str(run))[0] == 0


class StaleStore(Store):
    """Lists what was there when it was opened, as an inconsistent service may."""

    def __init__(self, url: Path) -> None:
        super().__init__(url)
        self._known = super().sizes()

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {name: size for name, size in self._known.items() if name.startswith(f"{prefix}/")}


def test_an_old_listing_hides_no_commit_and_lets_none_pass(tmp_path: Path) -> None:
    store = Store(tmp_path)
    lease = take(store)
    commit_steps(store, lease, 10)
    stale = StaleStore(tmp_path)
    (second,) = commit_steps(store, lease, 20)
    assert checkpoint.load(stale, second.name) == second, "manifests are opened by name"
    assert next(size_damages(stale, second)).found == "no file"
    third = write_next(store, lease, 30)
    with pytest.raises(checkpoint.CommitRefused, match="no file"):
        checkpoint.commit(stale, third, lease)
    assert read_lineage(store)[0] == second.name
