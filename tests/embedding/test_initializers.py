"""First values: a function of (seed, table, row), whoever asks, in whatever parts; and every form of a user's
initializer.
"""

# Wrong arguments are passed on purpose.
# pyright: reportArgumentType=false

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from podembed.embedding.initializers import (
    _HALF_MASS,
    ROWS_PER_SHARD,
    Constant,
    RandomNormal,
    RowId,
    TruncatedNormal,
    Uniform,
    _normal_center,
    _normal_tail,
    row_source,
    table_seed,
)
from tests.long_tests import examples


def probability_of(samples: np.ndarray, distribution: Any) -> float:
    """That samples of a distribution lie as far from it, by Kolmogorov and Smirnov."""
    # It takes two seconds to import, and each process of a run of the tests imports this file.
    from scipy.stats import kstest

    return kstest(samples, distribution).pvalue


def made(initializer, rows, dim=4, seed=3, table_name="t", num_rows=None):
    out = np.full((len(rows), dim), np.nan, np.float32)
    fill = row_source(initializer, seed=seed, table_name=table_name, num_rows=num_rows, dim=dim)
    fill(np.asarray(rows, np.int64), out)
    return out


@given(
    rows=st.lists(st.integers(0, 2**40), max_size=20),
    dim=st.sampled_from([1, 3, 8, 17]),
    initializer=st.sampled_from([TruncatedNormal(0.5), RandomNormal(0.5), Uniform(-1.0, 2.0), Constant(3.0), RowId(2)]),
)
@settings(max_examples=examples(50), deadline=None)
def test_a_row_does_not_depend_on_the_rows_made_with_it(rows, dim, initializer):
    together = made(initializer, rows, dim)
    for number, row in enumerate(rows):
        assert np.array_equal(made(initializer, [row], dim)[0], together[number])


def test_values_depend_on_seed_table_row_and_column():
    rows = np.arange(50)
    base = made(TruncatedNormal(1.0), rows)
    assert np.array_equal(base, made(TruncatedNormal(1.0), rows))
    assert not np.isclose(base, made(TruncatedNormal(1.0), rows, seed=4)).any()
    assert not np.isclose(base, made(TruncatedNormal(1.0), rows, table_name="u")).any()
    assert len(np.unique(base)) == base.size


def test_values_are_pinned():
    """These bits are part of what a run is: changing them changes every run that starts from scratch."""
    assert table_seed(0, "users") == 1617513272942915387
    assert made(TruncatedNormal(1.0), [0, 1], dim=2, seed=0, table_name="users").tolist() == PINNED_NORMAL
    assert made(RandomNormal(1.0), [0, 1], dim=2, seed=0, table_name="users").tolist() == PINNED_WHOLE_NORMAL
    assert made(Uniform(0.0, 1.0), [5], dim=2, seed=0, table_name="users").tolist() == PINNED_UNIFORM


PINNED_NORMAL = [[0.7798119783401489, 0.6351567506790161], [-0.6604397296905518, -0.36589914560317993]]
PINNED_WHOLE_NORMAL = [[0.826373279094696, 0.6702494025230408], [-0.6973804235458374, -0.38420310616493225]]
PINNED_UNIFORM = [[0.4149104058742523, 0.8266013860702515]]


def test_truncated_normal_has_the_distribution_it_names():
    values = made(TruncatedNormal(stddev=2.0, mean=1.0), np.arange(20_000), dim=5).astype(np.float64).ravel()
    scaled = (values - 1.0) / 2.0
    assert np.abs(scaled).max() <= 2.0
    cdf = lambda z: (ndtr(z) - ndtr(-2.0)) / (ndtr(2.0) - ndtr(-2.0))  # noqa: E731
    assert probability_of(scaled, cdf) > 1e-3
    assert scaled.mean() == pytest.approx(0.0, abs=0.015)
    assert scaled.std() == pytest.approx(0.8796, abs=0.01)


def test_normal_has_the_distribution_it_names():
    values = made(RandomNormal(stddev=2.0, mean=1.0), np.arange(40_000), dim=25).astype(np.float64).ravel()
    scaled = (values - 1.0) / 2.0
    assert probability_of(scaled, "norm") > 1e-3
    assert scaled.std() == pytest.approx(1.0, abs=0.005)
    # As many in the tails as there should be: 2.7e-3 and 6.3e-5 of a million.
    assert (np.abs(scaled) > 3).sum() == pytest.approx(2_700, rel=0.1)
    assert 35 < (np.abs(scaled) > 4).sum() < 100


def test_normal_is_the_inverse_of_the_normal_distribution_at_every_random_bit():
    """Against scipy, center, seam and both tails; it rises, and what is as far on both sides is the same number."""
    units = (np.r_[np.arange(50_000), np.arange(2**23 - 1_000, 2**23), np.arange(370_000, 390_000)] + 0.5) / 2**24
    seam = 0.5 - _HALF_MASS
    for unit in units:
        z = _normal_tail(unit) if unit <= seam else -_normal_center(unit - 0.5)
        assert z == pytest.approx(-ndtri(unit), abs=2e-7)
    assert _normal_tail(seam) == pytest.approx(_normal_center(_HALF_MASS), abs=2e-7)


def test_uniform_has_the_distribution_it_names():
    values = made(Uniform(-1.0, 3.0), np.arange(20_000), dim=5).astype(np.float64).ravel()
    assert -1.0 < values.min() < values.max() < 3.0
    assert probability_of((values + 1.0) / 4.0, "uniform") > 1e-3


def test_neighbouring_rows_and_columns_are_not_correlated():
    values = made(Uniform(0.0, 1.0), np.arange(4000), dim=8)
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.03


def test_default_form_of_a_users_initializer():
    seen = []

    def mine(rows, dim, seed):
        seen.append(seed)
        return np.repeat(rows[:, None] * 2.0, dim, axis=1)

    assert made(mine, [3, 1]).tolist() == [[6.0] * 4, [2.0] * 4]
    assert seen == [table_seed(3, "t")]


def test_initializer_of_the_whole_table():
    def whole(shape, dtype=None, **kwargs):
        return np.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)

    assert made(whole, [2, 0], num_rows=3).tolist() == [[8.0, 9.0, 10.0, 11.0], [0.0, 1.0, 2.0, 3.0]]
    assert made(lambda s, d: np.ones(s, d), [1], num_rows=3).tolist() == [[1.0] * 4]


def test_initializer_with_shard_info_sees_the_same_shards_whoever_asks():
    def by_shard(shape, dtype, shard_info):
        assert tuple(shard_info.shape) == tuple(shape)
        start = shard_info.offset[0]
        assert start % ROWS_PER_SHARD == 0
        return np.arange(start, start + shape[0], dtype=dtype)[:, None] + np.zeros(shape, dtype)

    rows = [0, 1, ROWS_PER_SHARD, 2 * ROWS_PER_SHARD + 4]
    assert made(by_shard, rows, num_rows=2 * ROWS_PER_SHARD + 5)[:, 0].tolist() == rows


def test_jax_initializers_are_understood():
    made_rows = made(jax.nn.initializers.normal(0.1), [4, 2], num_rows=6)
    assert np.array_equal(made_rows[1], made(jax.nn.initializers.normal(0.1), [2], num_rows=6)[0])
    assert not np.array_equal(made_rows[0], made_rows[1])
    assert not np.allclose(made_rows, made(jax.nn.initializers.normal(0.1), [4, 2], num_rows=6, table_name="u"))


@pytest.mark.parametrize(
    ("initializer", "text"),
    [
        (lambda rows, dim, seed: np.zeros((dim, len(rows))), r"made shape \(4, 3\)"),
        (lambda rows, dim, seed: np.zeros(dim), r"made shape \(4,\)"),
        (lambda shape, dtype: np.zeros(shape[::-1]), "made shape"),
        (lambda shape, dtype, shard_info: np.zeros((1, 1)), "made shape"),
        (lambda a, b, c, d: None, "with parameters"),
        (lambda: None, "with parameters"),
    ],
)
def test_wrong_initializers_are_refused(initializer, text):
    with pytest.raises(ValueError, match=text):
        made(initializer, [0, 1, 2], num_rows=10)


def test_number_of_rows_is_asked_for_where_it_is_needed():
    with pytest.raises(ValueError, match="num_rows"):
        made(lambda shape, dtype: np.zeros(shape), [0])


def test_limits_of_the_built_in_ones_are_checked():
    for make in (
        lambda: TruncatedNormal(-0.1),
        lambda: TruncatedNormal(np.nan),
        lambda: Uniform(1.0, 0.0),
        lambda: Uniform(0.0, np.inf),
    ):
        with pytest.raises(ValueError, match="Found"):
            make()
