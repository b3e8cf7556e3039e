"""Data in an object store, a real one behind the loopback interface: every kind of file, a store that fails in between,
files that change.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec import AbstractFileSystem
from fsspec.config import conf

from podembed.embedding.buckets import split_evenly
from podembed.jobs.text.criteo import convert_criteo
from podembed.workers.data import files
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import InputData, ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.storage.retry import RetryPolicy
from podembed.workers.storage.storage_errors import StoreUnavailable
from tests.ailing_proxy import AilingProxy, Fault, ailing_proxy
from tests.batches import joined
from tests.click_logs import click_lines
from tests.workers.formats.parquet_sets import assert_same
from tests.workers.input.test_order import SIZE, write_files

# As patient as the product, but in milliseconds.
HASTY = RetryPolicy(max_attempts=6, first_wait_s=0.01, max_wait_s=0.05, deadline_s=20.0)


def past_the_proxy(url: str) -> tuple[AbstractFileSystem, str]:
    return fsspec.url_to_fs(url, endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def upload(folder: Path, url: str) -> None:
    filesystem, root = past_the_proxy(url)
    for path in folder.iterdir():
        filesystem.pipe_file(f"{root}/{path.name}", path.read_bytes())


def moved(data: InputData, url: str) -> InputData:
    """The same declaration over the files in another place."""
    values = {name: getattr(data, name) for name in ("label", "dense", "features", "max_bad_rows")}
    if hasattr(data, "rows_per_block"):
        values["rows_per_block"] = data.rows_per_block
    return type(data)(f"{url}/{Path(data.paths[0]).name}", **values)


def read_all(data: InputData, *, num_hosts: int) -> list[Batch]:
    index = build_index(data)
    plan = training_plan(index, num_lanes=4, batch_size=12, seed=3)
    readers = [InputReader(data, index, plan, lanes) for lanes in split_evenly(4, num_hosts)]
    steps = range(2 * plan.steps_per_epoch)
    batches = [joined([reader.read(step) for reader in readers]) for step in steps]
    for reader in readers:
        reader.close()
    return batches


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz", "npy"])
def test_the_same_batches_from_a_store_as_from_a_disk(tmp_path: Path, s3_url: str, kind: str) -> None:
    declared = write_files(tmp_path, kind, [14, 9, 20], {5}, 6)
    upload(tmp_path, s3_url)
    local = read_all(declared, num_hosts=1)
    for left, right in zip(read_all(moved(declared, s3_url), num_hosts=3), local, strict=True):
        assert_same(left, right)


def test_click_logs_are_converted_from_a_store(tmp_path: Path, s3_url: str) -> None:
    text = b"\n".join([*click_lines(300), b"broken"]) + b"\n"
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "day_0.gz").write_bytes(gzip.compress(text))
    upload(tmp_path / "days", s3_url)
    near = convert_criteo([f"{tmp_path}/days/day_*.gz"], tmp_path / "near")
    far = convert_criteo([f"{s3_url}/day_*.gz"], tmp_path / "far")
    assert (far.kept, far.malformed) == (near.kept, near.malformed) == (300, 1)
    assert pq.read_table(far.folder / "part-00000.parquet").equals(pq.read_table(near.folder / "part-00000.parquet"))
    assert far.bad_lines[0].file.startswith("s3://")


# ---------------------------------------------------------------------- a store that fails


@pytest.fixture
def proxy(s3_environment: Mapping[str, str], s3_url: str) -> Iterator[AilingProxy]:
    with (
        ailing_proxy(s3_environment["AWS_ENDPOINT_URL"]) as proxy,
        patch.object(files, "DATA_RETRIES", HASTY),
        # As a file of the user's in ~/.config/fsspec does it. Clients do not insist by themselves, so that what is seen
        # is ours.
        patch.dict(conf, {"s3": {"endpoint_url": proxy.url, "config_kwargs": {"retries": {"max_attempts": 0}}}}),
    ):
        yield proxy


def parquet_in(tmp_path: Path, url: str) -> tuple[ParquetData, list[Batch]]:
    """A set in the store, and the batches that it has."""
    declared = write_files(tmp_path, "parquet", [14, 9], set(), 6)
    upload(tmp_path, url)
    remote = moved(declared, url)
    assert isinstance(remote, ParquetData)
    return remote, read_all(declared, num_hosts=1)


def every(number: int, fault: Fault) -> Callable[[str, str, int], Fault]:
    """Each object answers only every so many requests."""
    return lambda method, path, before: "pass" if before % number == number - 1 else fault


@pytest.mark.parametrize("fault", ["refuse", "drop", "hang"])
def test_a_store_that_fails_now_and_then_gives_the_same_batches(
    tmp_path: Path, s3_url: str, proxy: AilingProxy, fault: Fault
) -> None:
    data, expected = parquet_in(tmp_path, s3_url)
    proxy.fault_of = every(2, fault)
    if fault == "hang":
        # The first request for each object and every fourth after it, since each lasts for its whole deadline.
        proxy.fault_of = lambda method, path, before: "hang" if before % 4 == 0 else "pass"
    with patch.object(files, "REQUEST_TIMEOUT_S", 0.4 if fault == "hang" else 20.0):
        found = read_all(data, num_hosts=1)
    for left, right in zip(found, expected, strict=True):
        assert_same(left, right)


def test_a_store_that_stays_away_ends_the_run_by_name(tmp_path: Path, s3_url: str, proxy: AilingProxy) -> None:
    data, _ = parquet_in(tmp_path, s3_url)
    index = build_index(data)
    reader = InputReader(
        data,
        index,
        training_plan(index, num_lanes=1, batch_size=4, seed=1),
        [0],
    )
    proxy.fault_of = lambda method, path, before: "refuse" if path.endswith(".parquet") else "pass"
    with pytest.raises((StoreUnavailable, InputError), match=r"\d\.parquet"):
        reader.read(0)
    proxy.fault_of = lambda method, path, before: "pass"
    assert reader.read(0).num_samples == 4


# ---------------------------------------------------------------------- files that change


def table_of(numbers: range) -> pa.Table:
    array = np.array(numbers)
    return pa.table({"label": array % 2, "int_0": array, "cat_0": array})


def written(path: str, numbers: range) -> int:
    filesystem, location = past_the_proxy(path)
    with filesystem.open(location, "wb") as file:
        # Sizes do not tell these files apart: neither compressed nor with dictionaries or statistics.
        pq.write_table(
            table_of(numbers), file, row_group_size=8, compression="none", use_dictionary=False, write_statistics=False
        )
    filesystem.invalidate_cache()
    return filesystem.info(location)["size"]


def one_file(url: str) -> ParquetData:
    return ParquetData(
        f"{url}/a.parquet", label="label", dense=("int_0",), features={"id": IdColumn("cat_0", vocabulary_size=SIZE)}
    )


def test_an_object_that_was_replaced_is_refused_by_name(s3_url: str) -> None:
    size_bytes = written(f"{s3_url}/a.parquet", range(16))
    data = one_file(s3_url)
    index = build_index(data)
    reader = InputReader(data, index, training_plan(index, num_lanes=1, batch_size=4, seed=1), [0])
    assert written(f"{s3_url}/a.parquet", range(1, 17)) == size_bytes
    with pytest.raises(InputError, match=r"Found s3://.*/a\.parquet with .* as when the run began"):
        reader.read(0)


def test_an_object_that_is_replaced_between_two_requests_is_refused(s3_url: str, proxy: AilingProxy) -> None:
    """The first requests of a file are answered from the old object, the others from one of the same shape."""
    path = f"{s3_url}/a.parquet"
    written(path, range(16))
    data = one_file(s3_url)
    index = build_index(data)
    reader = InputReader(data, index, training_plan(index, num_lanes=1, batch_size=4, seed=1), [0])
    replaced: list[int] = []
    begun = len(proxy.requests)

    def replace_behind_the_footer(method: str, path_: str, before: int) -> Fault:
        gets = sum(method == "GET" and name.endswith("a.parquet") for method, name in proxy.requests[begun:])
        if gets == 2 and not replaced:
            replaced.append(written(path, range(1, 17)))
        return "pass"

    proxy.fault_of = replace_behind_the_footer
    with pytest.raises(InputError, match=r"Found s3://.*/a\.parquet with .* as when the run began"):
        reader.read(0)
    assert replaced
