"""Data in Google Cloud Storage, as far as its emulator in Python goes: every kind of file, and an object that was
replaced.

Runs where the extras `gcs` and `gcs-emulator` are installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.config import conf

from podembed.workers.data.files import filesystem_of
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from tests.processes import free_port
from tests.workers.formats.parquet_sets import assert_same
from tests.workers.input.test_order import write_files
from tests.workers.input.test_remote_input import moved, read_all

BUCKET = "runs"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket of an emulator."""
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise gcsfs asks a second service, by gRPC, which kind of bucket it is.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs")
        server_module = pytest.importorskip("gcp_storage_emulator.server")
        port = free_port()
        server = server_module.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
        server.start()
        try:
            options = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "use_listings_cache": False}
            # As a file of the user's in ~/.config/fsspec does it.
            patch.setitem(conf, "gs", options)
            patch.setitem(conf, "gcs", options)
            yield f"gs://{BUCKET}"
        finally:
            server.stop()


def upload(folder: Path, url: str) -> None:
    filesystem, root = filesystem_of(url)
    for path in folder.iterdir():
        filesystem.pipe_file(f"{root}/{path.name}", path.read_bytes())


@pytest.mark.parametrize("kind", ["parquet", "csv.gz", "npy"])
def test_the_same_batches_from_gcs_as_from_a_disk(tmp_path: Path, bucket: str, kind: str) -> None:
    declared = write_files(tmp_path, kind, [14, 9], {5}, 6)
    url = f"{bucket}/{kind.replace('.', '-')}"
    upload(tmp_path, url)
    found = read_all(moved(declared, url), num_hosts=2)
    for left, right in zip(found, read_all(declared, num_hosts=1), strict=True):
        assert_same(left, right)


def test_an_object_that_was_replaced_is_refused_by_name(tmp_path: Path, bucket: str) -> None:
    declared = write_files(tmp_path, "npy", [14], set(), 6)
    url = f"{bucket}/replaced"
    upload(tmp_path, url)
    data = moved(declared, url)
    index = build_index(data)
    reader = InputReader(data, index, training_plan(index, num_lanes=1, batch_size=4, seed=1), [0])
    write_files(tmp_path, "npy", [14], {2}, 6)
    upload(tmp_path, url)
    with pytest.raises(InputError, match=r"Found gs://.*0_labels\.npy with .* as when the run began"):
        reader.read(0)
