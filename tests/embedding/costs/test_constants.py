"""Curves of memory, and the fit of constants: what went in comes out."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.costs.constants import KINDS, Counts, Kernels, MemoryCurve, fitted

CURVE = MemoryCurve(size_bytes=(1 << 16, 1 << 20, 1 << 28), row_ns=(2.0, 4.0, 10.0))


@pytest.mark.parametrize(
    ("size", "share"),
    [(0, 0.0), (1, 0.0), (1 << 16, 0.0), (1 << 20, 0.25), (1 << 24, 0.625), (1 << 28, 1.0), (1 << 40, 1.0)],
)
def test_a_memory_is_as_far_as_its_size_says(size: int, share: float) -> None:
    assert CURVE.far_share(size) == pytest.approx(share)


def test_a_flat_curve_has_nothing_far() -> None:
    flat = MemoryCurve(size_bytes=(1 << 16, 1 << 28), row_ns=(3.0, 3.0))
    assert flat.far_share(1 << 28) == 0.0


def test_counts_add_up_and_scale() -> None:
    one, two = Counts(calls=2.0, ids=10.0), Counts(ids=5.0, far_rows=1.0)
    assert one + two == Counts(calls=2.0, ids=15.0, far_rows=1.0)
    assert two * 3 == Counts(ids=15.0, far_rows=3.0)
    assert Counts.of(one.values) == one


def test_the_fit_finds_the_constants_that_made_the_steps() -> None:
    """Also where nothing measured says how much a kind costs: that one costs nothing."""
    random = np.random.default_rng(0)
    truth = dict(zip(KINDS, (5000.0, 0.0, 300.0, 2.0, 7.0, 0.1, 0.0, 0.0, 0.0, 12.0, 0.4), strict=True))
    samples = []
    for _ in range(40):
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


def test_no_constant_is_negative() -> None:
    """A least squares fit alone would give the second kind a negative factor."""
    samples = [(Counts(ids=1e6, bags=1e6), 1e-3), (Counts(ids=1e6), 2e-3), (Counts(ids=2e6, bags=1e6), 3e-3)]
    factors, _ = fitted(samples)
    assert min(factors) >= 0.0
