"""Data in Google Cloud Storage, as far as its emulator in Python goes: every kind of file, and an object that was
replaced.

Runs where the extras `gcs` and `gcs-emulator` are installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podembed.workers.data.errors import InputError
from podembed.workers.data.files import filesystem_of
from podembed.workers.input.reader import InputReader, build_index, training_plan
from tests.processes import free_port
from tests.workers.formats.parquet_sets import assert_same
from tests.workers.input.test_order import write_files
from tests.workers.input.test_remote_input import moved, read_all

BUCKET = "runs"


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """Storage options that lead to an emulator of this module."""
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise gcsfs asks a second service, by gRPC, which kind of bucket it is.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs")
        server_module = pytest.importorskip("gcp_storage_emulator.server")
        port = free_port()
        server = server_module.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
        server.start()
        try:
            yield {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "use_listings_cache": False}
        finally:
            server.stop()


def upload(folder: Path, url: str, options: dict[str, Any]) -> None:
    filesystem, root = filesystem_of(url, storage_options=options)
    for path in folder.iterdir():
        filesystem.pipe_file(f"{root}/{path.name}", path.read_bytes())


@pytest.mark.parametrize("kind", ["parquet", "csv.gz", "npy"])
def test_the_same_batches_from_gcs_as_from_a_disk(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    declared = write_files(tmp_path, kind, [14, 9], {5}, 6)
    url = f"gs://{BUCKET}/{kind.replace('.', '-')}"
    upload(tmp_path, url, options)
    found = read_all(moved(declared, url), num_hosts=2, storage_options=options)
    for left, right in zip(found, read_all(declared, num_hosts=1), strict=True):
        assert_same(left, right)


def test_an_object_that_was_replaced_is_refused_by_name(tmp_path: Path, options: dict[str, Any]) -> None:
    declared = write_files(tmp_path, "npy", [14], set(), 6)
    url = f"gs://{BUCKET}/replaced"
    upload(tmp_path, url, options)
    data = moved(declared, url)
    index = build_index(data, storage_options=options)
    reader = InputReader(
        data, index, training_plan(index, num_lanes=1, batch_size=4, seed=1), [0], storage_options=options
    )
    write_files(tmp_path, "npy", [14], {2}, 6)
    upload(tmp_path, url, options)
    with pytest.raises(InputError, match=r"Found gs://.*0_labels\.npy with .* as when the run began"):
        reader.read(0)
