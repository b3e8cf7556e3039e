"""What a commit says of many buckets is held as columns, and reads as what it is of each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.workers.actors import _copied as copied
from podembed.workers.checkpoint.checkpoint_files import (
    ArrayFiles,
    BucketReceipt,
    ChunkFile,
    ChunkFiles,
    TablePlan,
    WrittenBuckets,
)
from podembed.workers.checkpoint.digest import Digests
from podembed.workers.checkpoint.files import assemble_delta, assemble_table
from podembed.workers.checkpoint.zarr_metadata import FLAT

ARRAYS = tuple(
    ArrayFiles(
        name=name,
        path=f"data/s000000010-g00000002/tables/t/{name}",
        width=1,
        dtype="float32",
        metadata_size_bytes=1,
        metadata_crc32c=1,
    )
    for name in ("rows", "accumulator")
)


def chunks_of(num_buckets: int, per_file: int) -> list[ChunkFile]:
    return [
        ChunkFile(
            array=array.name,
            bucket=first,
            name=f"{array.path}/c.{first // per_file}.0.0",
            size_bytes=100 + len(array.name),
            crc32c=tuple((number + 1) * (2**32 - 1 - bucket) % 2**32 for bucket in range(first, first + per_file)),
        )
        for number, array in enumerate(ARRAYS)
        for first in range(0, num_buckets, per_file)
    ]


@given(data=st.binary(max_size=200))
def test_digests_are_texts(data: bytes) -> None:
    data = data[: len(data) // 16 * 16]
    texts = tuple(data[at : at + 16].hex() for at in range(0, len(data), 16))
    found = Digests.of(texts)
    assert found.data == data
    assert found == texts
    assert found == Digests(data)
    assert hash(found) == hash(texts)
    assert [*found] == [*texts]
    assert found[1:] == texts[1:]
    assert [found[at] for at in range(-len(texts), 0)] == [*texts]
    with pytest.raises(IndexError):
        found[len(texts)]


@settings(deadline=None)
@given(power=st.integers(0, 5), shift=st.integers(0, 5))
def test_columns_are_the_same_files(power: int, shift: int) -> None:
    num_buckets, per_file = 1 << power, 1 << min(shift, power)
    files = chunks_of(num_buckets, per_file)
    found = ChunkFiles.of(files, ARRAYS, num_buckets=num_buckets, buckets_per_file=per_file, separator=FLAT)
    assert found is not None
    assert found == tuple(files)
    assert hash(found) == hash(tuple(files))
    assert [*found] == files
    assert found[-1] == files[-1]
    assert found[:2] == tuple(files[:2])
    assert dict(found.sizes()) == {file.name: file.size_bytes for file in files}
    assert found.size_bytes == sum(file.size_bytes for file in files)
    with pytest.raises(IndexError):
        found[len(files)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda files: files[1:],
        lambda files: files[:-1],
        lambda files: [*files, files[-1]],
        lambda files: [files[1], files[0], *files[2:]],
        lambda files: [replace(files[0], name=files[1].name), *files[1:]],
        lambda files: [replace(files[0], size_bytes=1), *files[1:]],
        lambda files: [replace(files[0], crc32c=(1,)), *files[1:]],
        lambda files: [replace(files[0], array="other"), *files[1:]],
        lambda files: [],
    ],
)
def test_files_that_are_not_all_there_in_order_are_no_columns(spoil) -> None:
    files = chunks_of(8, 2)
    assert ChunkFiles.of(spoil(files), ARRAYS, num_buckets=8, buckets_per_file=2, separator=FLAT) is None


def written_by(hosts: int, num_buckets: int, per_file: int) -> list[WrittenBuckets]:
    """The files of `chunks_of`, written by hosts in turn."""
    files = chunks_of(num_buckets, per_file)
    receipts = [
        BucketReceipt(
            bucket=first.bucket,
            chunks=(first, second),
            digests=tuple(f"{bucket:032x}" for bucket in first.buckets),
        )
        for first, second in zip(files[: len(files) // 2], files[len(files) // 2 :], strict=True)
    ]
    return [WrittenBuckets.of(plan_of(num_buckets, per_file), receipts[host::hosts]) for host in range(hosts)]


def plan_of(num_buckets: int, per_file: int) -> TablePlan:
    return TablePlan(
        attempt="s000000010-g00000002",
        name="t",
        num_rows=num_buckets,
        num_buckets=num_buckets,
        widths={array.name: array.width for array in ARRAYS},
        dtypes={},
        buckets_per_file=per_file,
    )


@settings(deadline=None)
@given(power=st.integers(0, 5), shift=st.integers(0, 5), hosts=st.integers(1, 5))
def test_what_hosts_wrote_is_a_table(power: int, shift: int, hosts: int) -> None:
    num_buckets, per_file = 1 << power, 1 << min(shift, power)
    written = written_by(hosts, num_buckets, per_file)
    table = assemble_table(plan_of(num_buckets, per_file), ARRAYS, copied(written[::-1]))
    assert isinstance(table.chunks, ChunkFiles)
    assert [*table.chunks] == chunks_of(num_buckets, per_file)
    assert [*table.digests] == [f"{bucket:032x}" for bucket in range(num_buckets)]
    assert sorted(bucket for one in written for bucket in one.buckets) == [*range(num_buckets)]
    assert sum(one.written_bytes for one in written) == table.size_bytes


@pytest.mark.parametrize(
    "spoil",
    [
        lambda written: written[1:],
        lambda written: [*written, written[0]],
        lambda written: [written[0], written[0]],
        lambda written: [replace(written[0], folder="data/s000000009-g00000002/tables/t"), written[1]],
        lambda written: [replace(written[0], arrays=("rows", "momentum")), written[1]],
        lambda written: [replace(written[0], size_bytes=(104, 110)), written[1]],
        lambda written: [replace(written[0], crc32c=(b"", b"")), written[1]],
        lambda written: [replace(written[0], firsts=written[0].firsts[::-1]), written[1]],
        lambda written: [],
    ],
)
def test_what_is_not_written_once_where_it_belongs_is_found(spoil) -> None:
    table = assemble_table(plan_of(8, 2), ARRAYS, spoil(written_by(2, 8, 2)))
    # Whoever publishes looks at single files, and refuses what is not there once.
    assert not isinstance(table.chunks, ChunkFiles)


@pytest.mark.parametrize(
    "numbers", [(0, 1, 2), (0, 1, 2, 3, 3), (0, 1, 2, 2), (0, 1, 2, 4), (0, 1, 2, -1), (), (0, 1, 2, 3, 4)]
)
def test_a_delta_has_the_digest_of_each_bucket_once(numbers: tuple[int, ...]) -> None:
    parent = assemble_table(plan_of(4, 1), ARRAYS, written_by(2, 4, 1))
    digests = Digests.of(f"{9 * number & 0xFF:032x}" for number in numbers)
    written = WrittenBuckets(folder="", firsts=np.array(numbers, "<i4").tobytes(), digests=digests)
    table = assemble_delta(parent, "s000000020-g00000002", (), [written])
    assert len(table.digests) != 4
    whole = WrittenBuckets(folder="", firsts=np.array([3, 1], "<i4").tobytes(), digests=Digests(b"d" * 16 + b"b" * 16))
    other = replace(whole, firsts=np.array([0, 2], "<i4").tobytes(), digests=Digests(b"a" * 16 + b"c" * 16))
    table = assemble_delta(parent, "s000000020-g00000002", (), [whole, other])
    assert table.digests == Digests(b"".join(16 * letter for letter in (b"a", b"b", b"c", b"d")))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "data/s000000010-g00000002/tables/t/rows/c.1.0.0"},
        {"size_bytes": 1},
        {"bucket": 2},
        {"crc32c": (1,)},
        {"array": "accumulator"},
    ],
)
def test_a_host_writes_files_under_their_names_alone(change) -> None:
    files = chunks_of(4, 2)
    receipts = [BucketReceipt(bucket=2 * at, chunks=(files[at], files[2 + at]), digests=()) for at in range(2)]
    assert len(WrittenBuckets.of(plan_of(4, 2), receipts).crc32c) == 2
    receipts[0] = replace(receipts[0], chunks=(replace(files[0], **change), files[2]))
    with pytest.raises(RuntimeError, match="rows"):
        WrittenBuckets.of(plan_of(4, 2), receipts)


def test_they_travel() -> None:
    files = chunks_of(8, 2)
    assert copied(files) == files
    found = ChunkFiles.of(files, ARRAYS, num_buckets=8, buckets_per_file=2, separator=FLAT)
    assert copied(found) == found
