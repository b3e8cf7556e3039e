"""`podembed prepare` as one types it, and the training that follows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from podembed.jobs.cli.data_arguments import data_arguments, plan_arguments
from podembed.jobs.prepare.command import Prepare, settings_of
from podembed.jobs.prepare.prepared_set import read_prepared
from podembed.jobs.prepare.settings import PrepareError
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import EXIT_CONFIGURATION
from podembed.workers.data.columns import DenseColumn
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.job.job import JobError
from podembed.workers.job.reference import JobReference
from tests.click_logs import click_lines
from tests.jobs.cli.test_main import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `train.tsv`, `test.tsv` and what the command makes of them: `vocabulary`, `test` like it, and `hash`."""
    folder = tmp_path_factory.mktemp("prepare")
    (folder / "train.tsv").write_bytes(b"\n".join([*click_lines(300), b"bad\tline"]) + b"\n")
    (folder / "test.tsv").write_bytes(b"\n".join(click_lines(100, seed=2)) + b"\n")
    more = ("--workers", "1")
    code, out, _ = run("prepare", f"{folder}/train.tsv", "--out", f"{folder}/vocabulary", "--ids", "vocabulary", *more)
    assert code == 0
    assert "301: 300 kept, 1 malformed" in out
    assert f"--data '{folder}/vocabulary/*.parquet'" in out
    test = ("prepare", f"{folder}/test.tsv", "--out", f"{folder}/test", "--like", f"{folder}/vocabulary", *more)
    assert run(*test)[0] == 0
    hashed = ("prepare", f"{folder}/train.tsv", "--out", f"{folder}/hash", "--max-rows", "500", *more)
    assert run(*hashed)[0] == 0
    assert "prepared already" in run(*hashed)[1]
    return folder


def arguments(data: str, eval_data: str | None = None) -> dict[str, object]:
    found = data_arguments("criteo", [data], [eval_data] if eval_data else [], max_bad_lines=0, notice=print)
    return {"function": "podembed.jobs.criteo:criteo", "arguments": found}


@pytest.mark.parametrize("kind", ["vocabulary", "hash"])
def test_the_job_takes_tables_and_ids_from_the_prepared_set(folder: Path, kind: str) -> None:
    job = JobReference(**arguments(f"{folder}/{kind}/*.parquet")).resolve()  # type: ignore[arg-type]
    sizes = {name: feature.table.vocabulary_size for name, feature in job.features.items()}
    assert sizes == {field.name: field.rows for field in read_prepared(f"{folder}/{kind}/prepared.json").fields}
    assert set(sizes.values()) == {500} if kind == "hash" else max(sizes.values()) < 100
    index = build_index(job.resolved_data)
    plan = training_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=0)
    batch = InputReader(job.resolved_data, index, plan, range(16)).read(0)
    assert np.count_nonzero(~batch.is_padding) == index.num_rows == 300
    for name, ragged in batch.features.items():
        assert ragged.num_ids == 300
        assert ragged.values.max() < sizes[name]


def test_csv_trains_from_the_command_line(tmp_path: Path) -> None:
    for name, clicks in (("train", 200), ("test", 50)):
        rows = [f"{at % 2},{at},city {at % 7},{at % 2}" for at in range(clicks)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["click,price,city,device", *rows]))
    form = ("--form", "csv", "--workers", "1")
    columns = ("--label", "click", "--dense-log1p", "price", "--fields", "city", "device", "--ids", "vocabulary")
    assert run("prepare", f"{tmp_path}/train.csv", "--out", f"{tmp_path}/train", *form, *columns)[0] == 0
    like = ("--like", f"{tmp_path}/train")
    assert run("prepare", f"{tmp_path}/test.csv", "--out", f"{tmp_path}/test", *form, *like)[0] == 0
    code, out, err = run(
        *("train", "--job", "criteo", "--data", f"{tmp_path}/train/*.parquet"),
        *("--eval-data", f"{tmp_path}/test/*.parquet", "--set", "model=dcn_v2", "batch_size=16", "dim=4"),
        *("--in-process", "--max-steps", "3", "--storage", str(tmp_path), "--name", "run"),
    )
    assert code == 0, err
    assert "200 training samples, 50 for evaluation\n2 tables, 11 rows" in out
    assert re.search(r"evaluation   AUC [01]\.\d{4}", out)


def test_sets_with_other_ids_do_not_go_together(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"different columns or ids\. .*--like"):
        arguments(f"{folder}/vocabulary/*.parquet", f"{folder}/hash/*.parquet")
    both = [f"{folder}/vocabulary/*.parquet", f"{folder}/hash/*.parquet"]
    with pytest.raises(ConfigurationError, match="prepared with different ids"):
        data_arguments("criteo", both, [], max_bad_lines=0, notice=print)
    with pytest.raises(ConfigurationError, match="prepared with different ids"):
        data_arguments("criteo", [f"{folder}/*/*.parquet"], [], max_bad_lines=0, notice=print)
    found = arguments(f"{folder}/vocabulary/*.parquet", f"{folder}/test/*.parquet")
    assert JobReference(**found).resolve().data.eval_paths == (f"{folder}/test/*.parquet",)  # type: ignore[arg-type]


def test_a_plan_knows_the_sizes(folder: Path) -> None:
    code, out, err = run("plan", "--data", f"{folder}/hash/*.parquet", "--hosts", "2")
    assert code == 0, err
    assert plan_arguments("criteo", [f"{folder}/hash/*.parquet"])["columns"] == f"{folder}/hash/prepared.json"
    assert plan_arguments("criteo", ["/no/such/*.parquet"]) == {"data": ["/no/such/*.parquet"]}
    assert "500" in out


def test_table_sizes_are_not_given_twice(folder: Path) -> None:
    reference = arguments(f"{folder}/hash/*.parquet")
    reference["arguments"]["vocabulary_size"] = 7  # type: ignore[index]
    with pytest.raises(JobError, match="vocabulary_size=7 beside a prepared set"):
        JobReference(**reference).resolve()  # type: ignore[arg-type]


def test_csv_flags() -> None:
    command = Prepare(
        sources=("a.csv",),
        out="out",
        form="csv",
        ids="vocabulary",
        label="y",
        dense=("a",),
        dense_log1p=("b",),
        fields=("f", "g"),
        hash_fields=("g",),
        min_count=4,
        max_rows=1000,
    )
    settings = settings_of(command)
    assert settings.dense == (DenseColumn("a"), DenseColumn("b", "log1p"))
    assert [(plan.name, plan.ids, plan.max_rows, plan.min_count) for plan in settings.fields] == [
        ("f", "vocabulary", 1000, 4),
        ("g", "hash", 1000, 4),
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"form": "csv", "label": "y"}, "--form csv without --label or --fields"),
        ({"form": "csv", "fields": ("a",)}, "--form csv without --label or --fields"),
        ({"label": "y"}, "--label with --form criteo"),
        ({"min_count": 3}, "--min-count with --ids hash"),
        ({"ids": "vocabulary", "hash_fields": ("c99",)}, r"hashed fields \['c99'\]"),
        ({"max_rows": 1}, "1 table rows for field 'c0'"),
        ({"ids": "vocabulary", "max_rows": 1}, "1 table rows for field 'c0'"),
        ({"ids": "vocabulary", "min_count": 0}, "least count of 0"),
        ({"rows_per_group": 0}, "rows_per_group 0"),
        ({"form": "csv", "label": "y", "fields": ("y",)}, r"columns \['y'\] named more than once"),
        ({"form": "csv", "label": "y", "fields": ("a/b",)}, "can name a file"),
        ({"like": "/no/such/folder"}, "no /no/such/folder/prepared.json"),
        ({"like": "x", "ids": "vocabulary"}, "--ids with --like"),
        ({"like": "x", "max_rows": 7, "label": "y"}, "--label, --max-rows with --like"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        settings_of(Prepare(sources=("x",), out="out", **flags))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"format_version": 2}', b'{"format_version": 1, "fields": [3]}']
)
def test_a_prepared_json_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "prepared.json").write_bytes(content)
    with pytest.raises(PrepareError, match=r"prepared\.json unreadable"):
        read_prepared(str(tmp_path / "prepared.json"))


def test_errors_are_sentences_and_leave_no_set(tmp_path: Path) -> None:
    (tmp_path / "day").write_text("no click\n" * 20)
    code, _, err = run("prepare", str(tmp_path / "day"), "--out", str(tmp_path / "out"), "--workers", "1")
    assert code == EXIT_CONFIGURATION
    assert "Found more than 10 malformed lines" in err
    assert "day:1, line: found 1 fields: 'no click', but a line has 40 fields between tabs" in err
    assert not (tmp_path / "out").exists()
