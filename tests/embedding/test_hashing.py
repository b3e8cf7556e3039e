from __future__ import annotations

import numpy as np

from podembed.embedding.hashing import combine, mix64, mix_word


def test_mixing_is_the_published_finalizer() -> None:
    # First outputs of SplitMix64 from state 0, as listed with its reference implementation.
    states = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert [hex(int(word)) for word in mix64(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_mixing_takes_64_bit_values_bit_for_bit() -> None:
    assert mix64(np.array([-1], np.int64))[0] == mix64(np.array([2**64 - 1], np.uint64))[0]
    assert mix64(np.array([7], np.int32))[0] == mix64(np.array([7], np.uint64))[0]


def test_mixing_leaves_its_input_alone() -> None:
    values = np.arange(4, dtype=np.uint64)
    mix64(values, salt=3)
    assert values.tolist() == [0, 1, 2, 3]


def test_salts_give_unrelated_mixes() -> None:
    values = np.arange(1000)
    assert not (mix64(values, salt=1) == mix64(values, salt=2)).any()
    bits = np.bitwise_count(mix64(values, salt=1) ^ mix64(values, salt=2))
    assert 28 < bits.mean() < 36


def test_combine_sees_order_and_every_part() -> None:
    seeds = {combine(1, 2), combine(2, 1), combine(1, 2, 0), combine(1), combine(-1), combine(2**70)}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_compiled_hash_is_the_plain_one() -> None:
    values = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    assert [int(mix_word(value, np.uint64(0))) for value in values[:50]] == mix64(values)[:50].tolist()
