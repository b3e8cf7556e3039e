"""Slips of the pen in a job's file: each is told with its line and what to write instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podembed.workers.job.job import JobError
from podembed.workers.job.reference import JobReference

MODULE = "job_with_a_slip"
HEAD = """import json
import optax
import podembed
from podembed import FeatureConfig, JobConfig, ParquetData, TableConfig
"""


@pytest.fixture(autouse=True)
def _forget_the_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in (MODULE, "tables_beside"):
        sys.modules.pop(name, None)


def resolve(folder: Path, *, body: str = "pass", above: str = "") -> str:
    """The path of the job's file; its function is called."""
    path = folder / f"{MODULE}.py"
    path.write_text(f"{HEAD}{above}\n\ndef my_job() -> JobConfig:\n    {body}\n")
    JobReference(function=f"{MODULE}:my_job").resolve()
    return str(path)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("TableConfig(vocab_size=50, dim=4)", r"argument 'vocab_size'\. .*Write vocabulary_size=\."),
        ("ParquetData('x', lable='y')", r"argument 'lable'\. Expected arguments of ParquetData: .*Write label=\."),
        ("FeatureConfig(TableConfig(5, 4), max_sequence=3)", r"Write max_sequence_length=\."),
        ("optax.adam(learning_rat=0.1)", r"adam\(\) got .*Write learning_rate=\."),
        ("TableConfig()", r"missing 2 required .*Expected arguments of TableConfig: vocabulary_size, dim, "),
        ("JobConfig(name='x')", r"missing 4 required .*Correct the line\."),
        ("podembed.TabelConfig(5, 4)", r"no attribute 'TabelConfig'.*Write TableConfig\."),
        ("TabelConfig(5, 4)", r"'TabelConfig' is not defined.*Write TableConfig\."),
        ("TableConfig(5, 4).dimm", r"Write dim\."),
        ("json.dumps()", r"missing 1 required .*Expected arguments of dumps: obj, "),
        ("len()", r"len\(\) takes exactly one argument.*Expected a line that runs\."),
        ("1 + 'a'", r"unsupported operand.*Expected a line that runs\."),
    ],
)
def test_a_slip_in_the_function_is_told_with_its_line(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(JobError, match=rf"^Found \w+Error in {tmp_path}/{MODULE}\.py, line 8: .*{said}"):
        resolve(tmp_path, body=body)


@pytest.mark.parametrize(
    ("above", "said"),
    [
        ("table = TableConfig(vocab_size=50, dim=4)", r"TypeError in .*, line 5: .*Write vocabulary_size=\."),
        ("from podembed import TabelConfig", r"ImportError in .*, line 5: .*Write TableConfig\."),
        ("import no_such_module", r"ModuleNotFoundError in .*, line 5: .*Install it, or correct the line\."),
        ("table = TableConfig(50, 4", r"no Python in .*, line 5: '\(' was never closed\."),
    ],
)
def test_a_slip_beside_the_function_is_told_too(tmp_path: Path, above: str, said: str) -> None:
    with pytest.raises(JobError, match=f"^Found {said}"):
        resolve(tmp_path, above=above)


def test_a_slip_in_a_module_of_the_same_folder_is_told_there(tmp_path: Path) -> None:
    (tmp_path / "tables_beside.py").write_text("import podembed\n\nusers = podembed.TableConfig(rows=5)\n")
    with pytest.raises(JobError, match=rf"in {tmp_path}/tables_beside\.py, line 3: "):
        resolve(tmp_path, above="import tables_beside")


def test_what_the_user_raises_and_what_fails_inside_a_library_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        resolve(tmp_path, body="{}['x']")
    sys.modules.pop(MODULE)
    with pytest.raises(TypeError) as raised:
        resolve(tmp_path, body="json.dumps(object())")
    assert not isinstance(raised.value, JobError)
