"""Headers are read back as written and never otherwise; views share the callers' bytes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.workers.mesh.frames import HEADER_BYTES, FrameHeader, Tag, byte_view, byte_views
from podembed.workers.mesh.mesh_errors import FrameError, MeshUsageError
from tests.long_tests import examples

_U32 = st.integers(0, 2**32 - 1)
_U64 = st.integers(0, 2**64 - 1)
_HEADERS = st.builds(
    FrameHeader,
    tag=_U32,
    step=st.integers(-(2**63), 2**63 - 1),
    sender=_U32,
    generation=_U64,
    sequence=_U64,
    payload_bytes=_U64,
)


@given(_HEADERS)
def test_a_header_is_read_back_as_written(header: FrameHeader) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert FrameHeader.unpack(data, rank=0) == header


@given(_HEADERS, st.integers(0, HEADER_BYTES * 8 - 1))
@settings(max_examples=examples(200))
def test_any_flipped_bit_of_a_header_is_found(header: FrameHeader, bit: int) -> None:
    data = bytearray(header.pack())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError) as caught:
        FrameHeader.unpack(bytes(data), rank=9)
    assert caught.value.rank == 9
    assert caught.value.field in ("magic", "header crc32c")


@pytest.mark.parametrize(
    "buffer",
    [
        b"abc",
        bytearray(b"abcdef"),
        memoryview(b"abcd").cast("H"),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.arange(4, dtype=">i4"),
        np.ones((3, 2), jnp.bfloat16),
        np.array(5.0),
        np.zeros(2, np.dtype([("id", "i8"), ("weight", "f4")])),
        np.array([True, False]),
    ],
    ids=lambda buffer: getattr(buffer, "dtype", type(buffer).__name__),
)
def test_views_hold_the_bytes_of_the_buffer(buffer: Any) -> None:
    view = byte_view(buffer)
    expected = buffer.tobytes() if hasattr(buffer, "tobytes") else bytes(buffer)
    assert bytes(view) == expected
    assert (view.format, view.ndim) == ("B", 1)


def test_views_share_memory_and_keep_protection() -> None:
    array = np.zeros((4, 2), np.float32)
    byte_view(array)[0] = 1
    assert array.view(np.uint8).reshape(-1)[0] == 1
    array.setflags(write=False)
    assert byte_view(array).readonly
    assert byte_view(b"x").readonly


def test_empty_buffers_are_left_out() -> None:
    assert byte_views([b"", np.zeros((0, 4), np.float32), np.zeros((3, 0)), bytearray()]) == []
    assert [bytes(view) for view in byte_views([b"a", b"", b"b"])] == [b"a", b"b"]


@pytest.mark.parametrize(
    "buffer",
    [np.zeros((4, 4))[:, 1], np.array([object()]), "text", 7, None, memoryview(b"abcd")[::2]],
    ids=["strided", "objects", "text", "number", "none", "strided view"],
)
def test_what_is_no_run_of_bytes_is_refused(buffer: Any) -> None:
    with pytest.raises(MeshUsageError, match="Expected a C-contiguous"):
        byte_view(buffer)


def test_goodbye_is_above_every_tag_of_callers() -> None:
    assert max(Tag) == Tag.GOODBYE == 2**32 - 1
