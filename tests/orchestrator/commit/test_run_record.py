"""RUN.json: created once, opened by equal starts, refused by others."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from podembed.orchestrator.api.run_errors import EXIT_CONFIGURATION
from podembed.orchestrator.commit.run_record import (
    RUN_FILE,
    RunMismatch,
    TableRecord,
    WarmStartRecord,
    find_run,
    open_or_create,
    read_run,
)
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, seal, unseal
from tests.orchestrator.commit.checkpoint_samples import RECORD


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


def test_the_first_start_creates_and_later_ones_open(store: Store) -> None:
    assert find_run(store) is None
    with pytest.raises(NameNotFound):
        read_run(store)
    assert open_or_create(store, RECORD) == RECORD
    later = dataclasses.replace(RECORD, run_id="run-2", created_unix_s=1.0)
    assert open_or_create(store, later) == RECORD
    assert read_run(store) == find_run(store) == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"num_lanes": 8},
        {"batch_size": 512},
        {"input_fingerprint": "sha256:5678"},
        {"staleness": 1},
        {"wire_dtype": "bfloat16"},
        {"order": "files"},
        {"job_arguments": "{}"},
        {"num_samples": 3_999},
        {"tables": (dataclasses.replace(RECORD.tables[0], num_rows=90),)},
        {"tables": (dataclasses.replace(RECORD.tables[0], num_buckets=8),)},
        {"tables": (dataclasses.replace(RECORD.tables[0], slots={}),)},
    ],
)
def test_a_different_run_is_refused_naming_the_difference(store: Store, change: dict) -> None:
    open_or_create(store, RECORD)
    with pytest.raises(RunMismatch, match=next(iter(change)).removesuffix("s")) as caught:
        open_or_create(store, dataclasses.replace(RECORD, **change))
    assert set(caught.value.differences) == set(change)
    assert caught.value.exit_code == EXIT_CONFIGURATION
    assert read_run(store) == RECORD


USERS = RECORD.tables[0]
ITEMS = dataclasses.replace(USERS, name="items", num_rows=90)


def users(**fields: Any) -> tuple[TableRecord, TableRecord]:
    return dataclasses.replace(USERS, **fields), ITEMS


@pytest.mark.parametrize(
    ("given", "said", "rules"),
    [
        (users(num_rows=74, num_buckets=8), "table 'users' has 37 rows, given 74 (users=grow)", "users=grow"),
        (users(num_rows=12), "table 'users' has 37 rows, given 12 (users=reinit)", "users=reinit"),
        (users(dim=6, slots={"accumulator": 6}), "table 'users' has dimension 3, given 6", "users=reinit"),
        (users(slots={}), "table 'users' has the optimizer slots accumulator (3), given none", "users=rows"),
        (users(num_rows=74, slots={}), "table 'users' has 37 rows, given 74 (users=reinit)", "users=reinit"),
        (users(num_buckets=8), "table 'users' has 4 buckets, given 8", ""),
        (users(name="people"), "table 'users' is called 'people' now", "people=rename=users"),
        ((ITEMS,), "table 'users' is not in the job", "users=drop"),
        ((*users(), dataclasses.replace(USERS, name="ads", dim=9)), "table 'ads' is new", "ads=reinit"),
        ((ITEMS, USERS), "the tables come as users, items, given as items, users", ""),
    ],
)
def test_of_tables_only_what_differs_is_told_with_the_rule_that_accepts_it(
    given: tuple[TableRecord, ...], said: str, rules: str
) -> None:
    refusal = str(RunMismatch({"tables": (users(), given)}, "/runs/of today"))
    assert f"  - {said}" in refusal
    assert "TableRecord" not in refusal
    assert "{" not in refusal
    asked = f" --warm-start-rules {rules}" if rules else ""
    assert refusal.endswith(f"podembed train --warm-start '/runs/of today'{asked}")


def test_of_arguments_and_beginnings_only_what_differs_is_told() -> None:
    begun = WarmStartRecord(location="/runs/old", run_id="x", commit="s1-g1", rules=("users=grow",))
    refusal = str(
        RunMismatch(
            {
                "job_arguments": ('{"rate": 0.1, "data": "a"}', '{"data": "a", "epochs": 2, "rate": 0.2}'),
                "warm_start": (None, begun),
            },
            "/runs/one",
        )
    )
    assert "  - job_arguments: epochs is its default, given 2\n  - job_arguments: rate is 0.1, given 0.2\n" in refusal
    assert "  - warm_start is none, given '/runs/old@s1-g1 users=grow'\n" in refusal


def test_a_record_from_before_there_were_orders_is_of_shuffled_samples(store: Store) -> None:
    open_or_create(store, RECORD)
    document = unseal(RUN_FILE, store.read(RUN_FILE, max_bytes=1 << 20))
    del document["order"]
    store.delete(RUN_FILE)
    store.create_exclusive(RUN_FILE, seal(document))
    assert read_run(store).order == "shuffled"
    assert open_or_create(store, RECORD) == RECORD
    with pytest.raises(RunMismatch, match="order is 'shuffled', given 'files'"):
        open_or_create(store, dataclasses.replace(RECORD, order="files"))


def test_what_changes_no_number_may_differ(store: Store) -> None:
    open_or_create(store, RECORD)
    assert open_or_create(store, dataclasses.replace(RECORD, overlap=not RECORD.overlap)) == RECORD


def test_of_many_starts_one_creates(store: Store) -> None:
    records = [dataclasses.replace(RECORD, run_id=f"run-{n}") for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda record: open_or_create(store, record), records))
    assert len({record.run_id for record in opened}) == 1


def test_a_damaged_record_is_refused(store: Store) -> None:
    open_or_create(store, RECORD)
    path = Path(store.locate(RUN_FILE))
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(DocumentRefused, match=r"RUN\.json"):
            open_or_create(store, RECORD)


def test_another_format_is_refused_with_advice(store: Store) -> None:
    open_or_create(store, RECORD)
    document = unseal(RUN_FILE, store.read(RUN_FILE, max_bytes=9999)) | {"format_version": 9}
    store.replace(RUN_FILE, seal(document))
    with pytest.raises(DocumentRefused, match="matching version of podembed"):
        open_or_create(store, RECORD)


def test_a_damaged_record_says_what_helps_and_not_what_cannot(tmp_path: Path) -> None:
    store = Store(tmp_path)
    open_or_create(store, RECORD)
    whole = (tmp_path / RUN_FILE).read_bytes()
    for content in (whole[:-9], b"", whole.replace(b"1024", b"1025")):
        (tmp_path / RUN_FILE).write_bytes(content)
        with pytest.raises(DocumentRefused, match="'RUN.json'.*any copy.*--warm-start .*podembed export") as found:
            read_run(store)
        assert "older commit" not in str(found.value)
        assert "--allow-ancestor" not in str(found.value)


def test_a_run_that_holds_tables_from_elsewhere_has_neither_a_job_nor_data() -> None:
    imported = dataclasses.replace(RECORD, job_function="", num_samples=0)
    assert imported.is_imported
    assert not dataclasses.replace(imported, num_samples=1).is_imported
    assert not RECORD.is_imported
