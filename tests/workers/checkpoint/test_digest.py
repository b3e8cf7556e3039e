"""The bucket digest against a plain Python reading of its definition, and the properties that recovery relies on."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from podembed.workers.checkpoint.digest import bucket_digest, format_digest, row_hashes
from tests.long_tests import examples

MASK = (1 << 64) - 1


def plain_mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def plain_row_hash(number: int, parts: list[bytes]) -> tuple[int, int]:
    a = plain_mix((number + 0x9E3779B97F4A7C15) & MASK)
    b = plain_mix((number + 0xD1B54A32D192ED03) & MASK)
    for part in parts:
        padded = part + bytes(-len(part) % 8)
        for at in range(0, len(padded), 8):
            word = int.from_bytes(padded[at : at + 8], "little")
            a = ((a ^ word) * 0xFF51AFD7ED558CCD) & MASK
            a ^= a >> 32
            b = ((b + word) * 0xC4CEB9FE1A85EC53) & MASK
            b ^= b >> 29
        a = plain_mix((a + len(padded) // 8) & MASK)
        b = plain_mix((b + len(padded) // 8) & MASK)
    return plain_mix(a), plain_mix(b)


def plain_digest(arrays: list[np.ndarray], *, first_row: int, row_stride: int, num_rows: int) -> str:
    a = b = 0
    for at in range(num_rows):
        row_a, row_b = plain_row_hash(first_row + at * row_stride, [array[at].tobytes() for array in arrays])
        a, b = (a + row_a) & MASK, (b + row_b) & MASK
    return f"{a:016x}{b:016x}"


@st.composite
def buckets(draw) -> list[np.ndarray]:
    positions = draw(st.integers(1, 13))
    widths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    dtypes = st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.int16])
    return [draw(hnp.arrays(draw(dtypes), (positions, width))) for width in widths]


@settings(max_examples=examples(60), deadline=None)
@given(buckets(), st.integers(0, 4095), st.sampled_from([1, 2, 64, 4096]), st.data())
def test_the_kernel_computes_the_definition(arrays, first_row, row_stride, data) -> None:
    num_rows = data.draw(st.integers(0, len(arrays[0])))
    options = {"first_row": first_row, "row_stride": row_stride, "num_rows": num_rows}
    assert bucket_digest(arrays, **options) == plain_digest(arrays, **options)


def test_the_definition_stays_what_it_is() -> None:
    """Digests are on storage: a changed constant would make every old checkpoint look damaged."""
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    slots = np.full((4, 1), 0.1, np.float32)
    assert bucket_digest([rows, slots], first_row=1, row_stride=2, num_rows=3) == "63b51ec3854d5ed41689c22ceca98d53"


def options(num_rows: int) -> dict[str, int]:
    return {"first_row": 3, "row_stride": 16, "num_rows": num_rows}


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_changed_bit_changes_the_digest(data) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    arrays = [rng.random((6, 5), np.float32), rng.random((6, 1), np.float32)]
    before = bucket_digest(arrays, **options(5))
    which, row = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 4))
    flat = arrays[which][row].view(np.uint8)
    flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert bucket_digest(arrays, **options(5)) != before


def test_padding_does_not_count() -> None:
    arrays = [np.ones((6, 5), np.float32)]
    before = bucket_digest(arrays, **options(4))
    arrays[0][4:] = 7
    assert bucket_digest(arrays, **options(4)) == before


def test_two_rows_that_change_places_are_noticed() -> None:
    rows = np.random.default_rng(0).random((4, 3), np.float32)
    assert bucket_digest([rows], **options(4)) != bucket_digest([rows[[1, 0, 2, 3]]], **options(4))


def test_rows_of_a_slot_that_moved_to_another_array_are_noticed() -> None:
    rows = np.random.default_rng(0).random((4, 4), np.float32)
    whole = bucket_digest([rows], **options(4))
    assert bucket_digest([rows[:, :2], rows[:, 2:]], **options(4)) != whole


def test_the_sum_can_be_maintained() -> None:
    rng = np.random.default_rng(1)
    old, new = rng.random((8, 3), np.float32), rng.random((8, 3), np.float32)
    mixed = old.copy()
    mixed[2] = new[2]
    hashes = row_hashes([old], **options(8))
    hashes[2] = row_hashes([new], **options(8))[2]
    assert format_digest(hashes) == bucket_digest([mixed], **options(8))
    # The order in which rows are added does not matter.
    assert format_digest(hashes[::-1]) == format_digest(hashes)


def test_strided_and_unaligned_arrays_have_the_digest_of_their_values() -> None:
    wide = np.random.default_rng(2).random((6, 9), np.float32)
    expected = bucket_digest([wide[:, 1:7].copy()], **options(6))
    assert bucket_digest([wide[:, 1:7]], **options(6)) == expected
    shifted = np.frombuffer(b"x" + wide[:, 1:7].tobytes(), np.uint8)[1:].view(np.float32).reshape(6, 6)
    assert bucket_digest([shifted], **options(6)) == expected
