"""What only a real service and its real client show."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fsspec.config import conf

from podembed.workers.storage.retry import RetryPolicy
from podembed.workers.storage.storage_errors import NameTaken, ServiceRefused, StorageError, StoreUnavailable
from podembed.workers.storage.store import Store
from tests.object_store import PAGE_SIZE
from tests.workers.storage.file_systems import NO_WAIT


def test_files_of_several_parts_are_created_exclusively_too(s3_url: str) -> None:
    store = Store(f"{s3_url}/run")
    data = np.random.default_rng(0).bytes(51 << 20)
    store.write_new("big", [data[: 1 << 20], data[1 << 20 :]])
    other = bytearray(data)
    other[-1] ^= 1
    with pytest.raises(NameTaken):
        store.write_new("big", [other])
    read = bytearray(len(data))
    store.read_into("big", [memoryview(read)])
    assert read == data


def test_more_files_than_one_listing_shows(s3_url: str) -> None:
    store = Store(f"{s3_url}/run")
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda at: store.write_new(f"data/{at}", [b"x"]), range(2 * PAGE_SIZE + 3))]
    assert len(store.sizes("data")) == len(store.children("data")) == 2 * PAGE_SIZE + 3


def test_a_bucket_that_is_not_there_is_named(s3_url: str) -> None:
    with pytest.raises(StorageError, match="failed: .*bucket does not exist"):
        Store("s3://no-such-bucket/run", waiting=NO_WAIT).probe()


def test_missing_credentials_are_told_at_once(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ServiceRefused, match="credentials"):
        Store(f"{s3_url}/run").create_exclusive("x", b"x")


def test_a_service_that_is_away_is_reported_in_words(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once = RetryPolicy(max_attempts=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = {"client_kwargs": {"endpoint_url": f"http://127.0.0.1:{listener.getsockname()[1]}"}}
    options["config_kwargs"] = {"retries": {"max_attempts": 0}}
    monkeypatch.setitem(conf, "s3", options)
    with pytest.raises(StoreUnavailable, match="Could not connect"):
        Store(f"{s3_url}/run", retry=once).size("RUN.json")
