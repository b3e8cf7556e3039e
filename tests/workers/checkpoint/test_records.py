"""What a commit says of many buckets is held as columns, and reads as what it is of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.workers.actors import _copied as copied
from podembed.workers.checkpoint.records import ArrayFiles, ChunkFile, ChunkFiles, Digests

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
            name=f"{array.path}/c/{first // per_file}/0/0",
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
    found = ChunkFiles.of(files, ARRAYS, num_buckets=num_buckets, buckets_per_file=per_file)
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
    assert ChunkFiles.of(spoil(files), ARRAYS, num_buckets=8, buckets_per_file=2) is None


def test_they_travel() -> None:
    files = chunks_of(8, 2)
    assert copied(files) == files
    found = ChunkFiles.of(files, ARRAYS, num_buckets=8, buckets_per_file=2)
    assert copied(found) == found
