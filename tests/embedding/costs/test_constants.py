"""Curves of memory, and the fit of constants: what went in comes out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from podembed.embedding.costs.constants import KINDS, Caches, Counts, Kernels, MemoryCurve, fitted

CURVE = MemoryCurve(size_bytes=(1 << 16, 1 << 20, 1 << 28), row_ns=(2.0, 4.0, 10.0))
CACHES = Caches(l2_bytes=1 << 20, l3_bytes=1 << 25)


@pytest.mark.parametrize(
    ("size", "second", "last"),
    [
        (0, 0.0, 0.0),
        (1 << 20, 0.0, 0.0),
        (1.5 * (1 << 20), math.log2(1.5), 0.0),
        (1 << 21, 1.0, 0.0),
        (1 << 24, 1.0, 0.0),
        (1 << 25, 1.0, 1.0),
        (1 << 40, 1.0, 1.0),
    ],
)
def test_what_a_cache_does_not_hold_grows_with_the_memory(size: float, second: float, last: float) -> None:
    """Of the last cache half counts, since others use it."""
    assert CACHES.beyond_l2(size) == pytest.approx(second)
    assert CACHES.beyond_l3(size) == pytest.approx(last)


def test_counts_add_up_and_scale() -> None:
    one, two = Counts(calls=2.0, ids=10.0), Counts(ids=5.0, rows=1.0)
    assert one + two == Counts(calls=2.0, ids=15.0, rows=1.0)
    assert two * 3 == Counts(ids=15.0, rows=3.0)
    assert Counts.of(one.values) == one


def test_the_fit_finds_the_constants_that_made_the_steps() -> None:
    """Also where nothing measured says how much a kind costs: that one costs nothing."""
    random = np.random.default_rng(0)
    known = {"steps": 5000.0, "calls": 300.0, "ids": 2.0, "bags": 7.0, "floats": 0.1, "row_lines": 12.0}
    truth = dict.fromkeys(KINDS, 0.0) | known
    samples = []
    for _ in range(80):
        counts = Counts(
            **{kind: float(random.integers(1, 1 << 14)) for kind in KINDS if kind not in ("steps", "rows")}, steps=1.0
        )
        samples.append((counts, 1e-9 * sum(truth[kind] * getattr(counts, kind) for kind in KINDS)))
    factors, error = fitted(samples)
    assert error < 1e-6
    assert dict(zip(KINDS, factors, strict=True))["rows"] == 0.0
    kernels = Kernels(num_processes=1, memory=CURVE, factors_ns={"pool/pooled": factors}, errors={})
    again = samples[7]
    assert kernels.seconds("pool/pooled", again[0]) == pytest.approx(again[1], rel=1e-6)
    assert kernels.seconds("pool/rows", again[0]) == 0.0


def test_a_few_odd_steps_do_not_decide_the_fit() -> None:
    """Least squares alone would end between the steps and the odd ones."""
    samples = [(Counts(ids=1e4 * count), 1e-5 * count) for count in range(1, 21)]
    odd = [(Counts(ids=1e4), 3e-5), (Counts(ids=2e4), 8e-5)]
    factors, _ = fitted([*samples, *odd])
    assert dict(zip(KINDS, factors, strict=True))["ids"] == pytest.approx(1.0, rel=0.02)


def test_no_constant_is_negative() -> None:
    """A least squares fit alone would give the second kind a negative factor."""
    samples = [(Counts(ids=1e6, bags=1e6), 1e-3), (Counts(ids=1e6), 2e-3), (Counts(ids=2e6, bags=1e6), 3e-3)]
    factors, _ = fitted(samples)
    assert min(factors) >= 0.0


def test_the_more_a_step_touches_the_less_of_its_code_is_in_the_caches_next_time() -> None:
    assert CACHES.cold_share(0.0) == 0.0
    assert CACHES.cold_share(4 * CACHES.l2_bytes) == pytest.approx(0.5)
    assert CACHES.cold_share(400 * CACHES.l2_bytes) == pytest.approx(1.0, abs=0.02)
